"""The comparison itself: a pure function of the columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from driftscope.comparison.differences import difference
from driftscope.comparison.figures import CAUSE_PREFIX, FIGURES, Figure, cause_figure
from driftscope.comparison.loading import SECTIONS, run_label
from driftscope.comparison.model import (
    Cell,
    Change,
    Comparison,
    FigureRow,
    FindingCell,
    FindingRow,
    Mark,
    RunColumn,
    Series,
    SettingRow,
    Skipped,
)
from driftscope.comparison.words import headline, notes, sentences
from driftscope.records import SEVERITIES

NOISE_MULTIPLE = 3.0
CHANCE = 0.01
SEEDS = ("seed", "data_seed")
LENGTHS = ("max_steps",)


def compare(runs: Sequence[RunColumn], baseline: int = 0, skipped: Sequence[Skipped] = ()) -> Comparison:
    """``runs`` side by side, each against ``runs[baseline]``; ``skipped`` are those that could not be read."""
    columns = labelled(runs)
    base = columns[baseline]
    groups = replicates(columns)
    figures = figure_rows(columns, baseline, groups)
    comparison = Comparison(
        runs=columns,
        baseline=baseline,
        headline="",
        sentences=(),
        settings=setting_rows(columns),
        figures=figures,
        findings=finding_rows(columns, base),
        skipped=tuple(skipped),
        replicates=groups,
    )
    return replace(comparison, headline=headline(comparison), sentences=sentences(comparison), notes=notes(comparison))


def labelled(runs: Sequence[RunColumn]) -> tuple[RunColumn, ...]:
    """The columns with the shortest directory names that tell them apart; the same path again gets a number."""
    paths = {run.path.absolute(): run_label(run.path) for run in runs}
    wholes = {path: run_label(path, len(path.parts)) for path in paths}
    same = {path: next(p for p in paths if wholes[p] == wholes[path]) for path in paths}  # a directory and its file
    distinct = set(same.values())
    for path in distinct:
        depth = 1
        while depth < len(path.parts) and any(
            run_label(path, depth) == run_label(p, depth) for p in distinct if p != path
        ):
            depth += 1
        paths[path] = run_label(path, depth)
    seen: dict[str, int] = {}
    out = []
    for run in runs:
        label = paths[same[run.path.absolute()]]
        seen[label] = seen.get(label, 0) + 1
        out.append(replace(run, label=label if seen[label] == 1 else f"{label} ({seen[label]})"))
    return tuple(out)


def setting_rows(columns: Sequence[RunColumn]) -> tuple[SettingRow, ...]:
    """The settings that differ between two runs that both have a run.json, by section."""
    known = [c for c in columns if c.settings]
    rows = []
    for section in SECTIONS:
        names = dict.fromkeys(name for c in known for name in c.settings.get(section, {}))
        for name in names:
            if len({c.settings.get(section, {}).get(name) for c in known}) > 1:
                values = tuple(c.settings.get(section, {}).get(name) for c in columns)
                rows.append(SettingRow(section, name, values))
    return tuple(rows)


def replicates(columns: Sequence[RunColumn]) -> tuple[tuple[int, ...], ...]:
    """Groups of different runs of one configuration: same stack, model and loss, another seed or length at most."""
    groups: dict[tuple[tuple[str, str, str], ...], dict[str, int]] = {}
    for index, column in enumerate(columns):
        if not column.settings or column.run_id is None:
            continue
        key = tuple(
            (section, name, text)
            for section in SECTIONS[:-1]  # how Driftscope measures is not how the run trains
            for name, text in sorted(column.settings.get(section, {}).items())
            if name not in (*SEEDS, *LENGTHS)
        )
        groups.setdefault(key, {}).setdefault(column.run_id, index)  # the same run twice is one run
    return tuple(tuple(found.values()) for found in groups.values() if len(found) > 1)


def figure_rows(
    columns: Sequence[RunColumn], baseline: int, groups: Sequence[Sequence[int]] = ()
) -> tuple[FigureRow, ...]:
    """Every figure that some run has."""
    causes = sorted({name for c in columns for name in c.series if name.startswith(CAUSE_PREFIX)})
    figures = [*FIGURES, *(cause_figure(name.removeprefix(CAUSE_PREFIX)) for name in causes)]
    table = {f.id: [values_of(c, f) for c in columns] for f in figures if f.get is not None}
    judged = sum(f.judged and any(table.get(f.id, ())) for f in figures)
    tests = max(1, judged * (len(columns) - 1))
    rows = []
    for figure in _ordered(figures):
        if figure.get is None:
            cells = [_scalar_cell(c, figure, columns[baseline]) for c in columns]
        else:
            found = table[figure.id]
            cells = [
                _cell(
                    figure, columns, found, baseline, i, tests=tests,
                    between=seed_spread(found, figure, yardsticks(groups, baseline, i)),
                )
                for i in range(len(columns))
            ]  # fmt: skip
        if any(cell.value is not None for cell in cells):
            rows.append(FigureRow(figure, tuple(cells)))
    return tuple(rows)


def values_of(column: RunColumn, figure: Figure) -> Series:
    """The run's series of that figure; the factor of a cause that was sought and never found is 1."""
    found = column.series.get(figure.id)
    if found is None and figure.id.startswith(CAUSE_PREFIX):
        return Series(column.attributed, (1.0,) * len(column.attributed))
    return found if found is not None else Series()


def yardsticks(groups: Sequence[Sequence[int]], baseline: int, index: int) -> list[list[int]]:
    """The groups of runs that say what a seed alone does to this pair; a run is no yardstick of itself."""
    chosen = [group for group in groups if index in group or baseline in group]
    return [[i for i in group if i != index or baseline not in group] for group in chosen]


def seed_spread(table: Sequence[Series], figure: Figure, groups: Sequence[Sequence[int]]) -> float:
    """How far apart the medians of runs of one configuration lie, at most: what another seed alone does."""
    widest = 0.0
    for group in groups:
        levels = [_median(_scaled(table[i], figure).values) for i in group if table[i]]
        if len(levels) > 1:
            widest = max(widest, max(levels) - min(levels))
    return widest


def _ordered(figures: Sequence[Figure]) -> list[Figure]:
    """The causes right after the gap."""
    own = [f for f in figures if not f.id.startswith(CAUSE_PREFIX)]
    at = 1 + max(i for i, f in enumerate(own) if f.of_pair)
    return [*own[:at], *(f for f in figures if f.id.startswith(CAUSE_PREFIX)), *own[at:]]


def _cell(
    figure: Figure,
    columns: Sequence[RunColumn],
    table: Sequence[Series],
    baseline: int,
    index: int,
    *,
    tests: int,
    between: float,
) -> Cell:
    a, b = table[baseline], table[index]
    if not b:
        return Cell()
    value = _median(b.values)
    if index == baseline:
        return Cell(value=value, mark="baseline")
    if not a:
        return Cell(value=value, mark="unavailable")
    if figure.of_pair and columns[index].pair != columns[baseline].pair:
        return Cell(value=value, mark="other_paths")
    noise = max(c.scalars.get("noise_floor", 0.0) for c in (columns[baseline], columns[index]))
    floor = max(figure.floor, between, NOISE_MULTIPLE * noise if figure.of_pair else 0.0)
    found = difference(_scaled(a, figure), _scaled(b, figure), floor=floor, tests=tests)
    before = _median(a.values)
    change = None if found.median is None else figure.off_scale(found.median)
    if figure.scale == "log" and min(before, value) < figure.lowest:  # the ratio to a rounding error says nothing
        change = None
    if not figure.judged:
        mark: Mark = "not_judged"
    elif found.bar is None:
        mark = "too_few"
    elif not found.exceeds:
        mark = "within"
    else:
        mark = _direction(figure, before, value)
    return Cell(
        value=value,
        change=change,
        bar=None if found.bar is None or not figure.judged else figure.off_scale(found.bar),
        pairs=found.pairs,
        independent=found.independent,
        mark=mark,
    )


def _direction(figure: Figure, before: float, after: float) -> Mark:
    """Nearer to what an honest run has, or further away."""
    if figure.ideal is None:
        return "differs"
    ideal = figure.on_scale(figure.ideal)
    was, now = abs(figure.on_scale(before) - ideal), abs(figure.on_scale(after) - ideal)
    return "differs" if was == now else "better" if now < was else "worse"


def _scalar_cell(column: RunColumn, figure: Figure, base: RunColumn) -> Cell:
    value = column.scalars.get(figure.id)
    mark: Mark = "baseline" if column is base else "not_judged"
    if figure.of_pair and column.pair != base.pair:
        mark = "other_paths"
    return Cell(value=value, mark="unavailable" if value is None else mark)


def _scaled(series: Series, figure: Figure) -> Series:
    return Series(series.steps, tuple(map(figure.on_scale, series.values)))


def _median(values: Sequence[float]) -> float:
    return float(median(values))


def finding_rows(columns: Sequence[RunColumn], base: RunColumn) -> tuple[FindingRow, ...]:
    """Every rule that fired somewhere: the worst first, then those that not all runs have."""
    found = [{f.rule: f for f in c.findings} for c in columns]
    rows = []
    for rule in dict.fromkeys(rule for by_rule in found for rule in by_rule):
        known = [by_rule[rule] for by_rule in found if rule in by_rule]
        worst = max(known, key=lambda f: SEVERITIES.index(f.severity))
        cells = tuple(_finding_cell(c, base, rule) for c in columns)
        rows.append((-SEVERITIES.index(worst.severity), len(known) == len(columns), rule, worst.title, cells))
    return tuple(FindingRow(rule, title, cells) for _, _, rule, title, cells in sorted(rows, key=lambda r: r[:3]))


def _finding_cell(column: RunColumn, base: RunColumn, rule: str) -> FindingCell:
    mine = next((f for f in column.findings if f.rule == rule), None)
    theirs = next((f for f in base.findings if f.rule == rule), None)
    if column is base:
        return FindingCell(mine, "baseline" if mine is not None else "none")
    if mine is None and theirs is None:
        return FindingCell(None, "none")
    if mine is None or theirs is None:
        found, other = (theirs, column) if mine is None else (mine, base)
        late = other.last_step is not None and found is not None and found.first_step > other.last_step
        if found is None or other.level == "unavailable" or (late and mine is None):
            return FindingCell(mine, "unknown", late)
        chance = by_chance(found.count, column.measured_steps, base.measured_steps, mine is None)
        return FindingCell(mine, "gone" if mine is None else "new", late, chance)
    step = SEVERITIES.index(mine.severity) - SEVERITIES.index(theirs.severity)
    change: Change = "same" if step == 0 else "worse" if step > 0 else "better"
    return FindingCell(mine, change)


def by_chance(count: int, mine: int, theirs: int, gone: bool) -> bool:
    """Whether ``count`` steps of a finding, at one rate in both runs, could all fall in one of them: P > 1%."""
    inside, all_steps = (theirs if gone else mine), mine + theirs
    if count > inside or count >= 2 * math.log(100) * all_steps / max(1, all_steps - inside):
        return False
    chance = 1.0
    for k in range(count):
        chance *= (inside - k) / (all_steps - k)
    return chance > CHANCE


__all__ = ["compare", "figure_rows", "finding_rows", "labelled", "replicates", "setting_rows"]
