"""The comparison in sentences: who is clean, what differs, and how far the comparison can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from driftscope._text import sig
from driftscope.comparison.differences import MIN_PAIRS
from driftscope.comparison.model import MARKED, Comparison, FigureRow, FindingCell, RunColumn

T = TypeVar("T")
LEVELS = ("clean", "info", "warning", "critical")
ONE = {"clean": "is clean", "info": "has no warning", "warning": "has warnings", "critical": "has critical findings"}
MANY = {
    "clean": "are clean",
    "info": "have no warning",
    "warning": "have warnings",
    "critical": "have critical findings",
}
TOLD = 4  # runs that get a sentence of their own
NAMED = 6
GROUPS = 2
BASIC = ("Versions and device", "Model", "Trainer")  # the configured loss follows from these


def headline(c: Comparison) -> str:
    """Which run is clean and which is worst, or that they agree; one sentence."""
    judged = [r for r in c.runs if r.level in LEVELS]
    if not judged:
        return f"Nothing was measured in any of the {len(c.runs)} runs, so there is nothing to compare."
    words = _levels(c, judged)
    if len(judged) < len(c.runs):
        missing = [r.label for r in c.runs if r.level not in LEVELS]
        words += f"; nothing was measured in {_names(missing)}"
    if len({r.level for r in judged}) == 1 and not any(map(_changed, _others(c, [f.cells for f in c.findings]))):
        words += _agreement(c)
    return words + "."


def _levels(c: Comparison, judged: Sequence[RunColumn]) -> str:
    levels = {r.level for r in judged}
    order = sorted(judged, key=_badness)
    worst = order[-1]
    said = f": {worst.headline.rstrip('.')}" if worst.level in ("warning", "critical") else ""
    if len(judged) == 1:
        return f"{worst.label} {ONE[worst.level]}{said}"
    if len(levels) == 1:
        same = c.runs[c.baseline] if c.runs[c.baseline] in judged else worst
        said = f": {same.headline.rstrip('.')}" if said else ""
        who = "Both runs" if len(judged) == 2 else f"All {len(judged)} runs"
        return f"{who} {MANY[worst.level]}{said}"
    if len(judged) == 2:
        return f"{order[0].label} {ONE[order[0].level]}, {worst.label} {ONE[worst.level]}{said}"
    fine = [r.label for r in judged if r.level in ("clean", "info")]
    if not fine:
        lead = f"None of the {len(judged)} runs is without warnings"
    else:
        lead = f"{len(fine)} of {len(judged)} runs {'has' if len(fine) == 1 else 'have'} no warning ({_names(fine)})"
    return f"{lead}; the worst, {worst.label}, {ONE[worst.level]}{said}"


def _badness(run: RunColumn) -> tuple[int, int]:
    return LEVELS.index(run.level), sum(f.judged and f.severity == run.level for f in run.findings)


def _agreement(c: Comparison) -> str:
    cells = [cell for row in c.figures for cell in _others(c, [row.cells])]
    if any(cell.mark in MARKED for cell in cells):
        return ", but figures differ"
    if any(cell.mark == "within" for cell in cells):
        return ", and no figure differs by more than what moves within the runs"
    return ", and there are too few steps in common to tell their figures apart"


def _others(c: Comparison, rows: Iterable[Sequence[T]]) -> list[T]:
    """The cells of all runs but the baseline."""
    return [cell for cells in rows for i, cell in enumerate(cells) if i != c.baseline]


def _changed(cell: FindingCell) -> bool:
    return cell.change in ("new", "gone", "worse", "better") and (cell.found is None or cell.found.judged)


def sentences(c: Comparison) -> tuple[str, ...]:
    """What stands behind the headline, a sentence a line."""
    others = [i for i in range(len(c.runs)) if i != c.baseline]
    if len(others) <= TOLD:
        lines = [_against(c, i) for i in others]
    else:
        marked = [c.runs[i].label for i in others if any(row.cells[i].mark in MARKED for row in c.figures)]
        base = c.runs[c.baseline].label
        lines = [f"Against {base}, {_names(marked) if marked else 'no run'} differs in at least one figure."]
        if len(marked) > 1:
            lines = [
                f"Against {base}, {len(marked)} of {len(others)} runs differ in at least one figure: {_names(marked)}."
            ]
    return (*lines, _configurations(c), _seeds(c))


def _against(c: Comparison, index: int) -> str:
    run, base = c.runs[index], c.runs[c.baseline]
    differing = [_figure_words(row, c.baseline, index) for row in c.figures if row.cells[index].mark in MARKED]
    parts = ["; ".join(differing)] if differing else [_undecided(c, index)]
    for change, said in (
        ("gone", "findings gone"),
        ("new", "new findings"),
        ("worse", "worse"),
        ("better", "less severe"),
    ):
        rules = [row.rule + _caution(row.cells[index]) for row in c.findings if row.cells[index].change == change]
        if rules:
            parts.append(f"{said}: {', '.join(rules)}")
    return f"{run.label} against {base.label}: {'; '.join(parts)}."


def _caution(cell: FindingCell) -> str:
    if cell.late:
        return " (after the baseline's last step)"
    return " (on so few steps that it may be chance)" if cell.chance else ""


def _figure_words(row: FigureRow, baseline: int, index: int) -> str:
    figure, before, after = row.figure, row.cells[baseline].value, row.cells[index]
    label = figure.label[:1].lower() + figure.label[1:]
    judged = f" ({after.mark})" if after.mark != "differs" else ""
    return f"{label} {_sig(before)} to {_sig(after.value)}{judged}"


def _sig(value: float | None) -> str:
    return sig(None if value is None else float(f"{value:.2e}"))  # 0.9999 is 1.00 at three digits, not 1.000


def _undecided(c: Comparison, index: int) -> str:
    marks = {row.cells[index].mark for row in c.figures}
    if "within" in marks:
        return "no figure differs by more than what moves within the runs"
    if "too_few" in marks:
        return f"fewer than {MIN_PAIRS} steps in common, too few to tell figures apart"
    return "no figure could be compared"


def _configurations(c: Comparison) -> str:
    silent = [r.label for r in c.runs if not r.settings]
    if len(c.runs) - len(silent) < 2:
        return f"How the runs were configured is unavailable for {_names(silent)}: run.json could not be read."
    rows = [row for row in c.settings if row.section in BASIC]
    lost = f" Unavailable for {_names(silent)}." if silent else ""
    if not rows:
        return f"As far as recorded, the runs were configured the same.{lost}"
    names = _names([row.name for row in rows])
    if len(rows) > 1:
        which = f"{len(rows)} recorded settings differ ({names})"
        return f"{which}, so this comparison alone cannot say which of them made a difference.{lost}"
    if len(c.runs) > 2:
        return f"One recorded setting differs: {names}.{lost}"
    before, after = (rows[0].values[i] or "not recorded" for i in (c.baseline, 1 - c.baseline))
    return f"One recorded setting differs: {names}, {before} to {after}.{lost}"


def _seeds(c: Comparison) -> str:
    if not c.replicates:
        return "One run of each configuration: what another seed alone would change is not known from these runs."
    groups = "; ".join(_names([c.runs[i].label for i in group]) for group in c.replicates)
    if len(c.replicates) > GROUPS:
        groups = f"{len(c.replicates)} groups, {sum(map(len, c.replicates))} runs"
    return (
        f"Same configuration but for seed and length: {groups}. A difference is marked only where it also exceeds "
        "what lies between the runs of such a group."
    )


def notes(c: Comparison) -> tuple[str, ...]:
    """What a reader has to know about single runs: cut off, still running, unavailable signals."""
    out = []
    base = c.runs[c.baseline]
    for i, run in enumerate(c.runs):
        out += [f"{run.label}: {problem}" for problem in run.problems]
        if run.status in ("running", "failed"):
            out.append(f"{run.label}: {'still running, or cut off' if run.status == 'running' else 'failed'}.")
        if run.unavailable:
            what = "; ".join(f"{name} ({why})" for name, why in sorted(run.unavailable.items()))
            out.append(f"{run.label}: unavailable, so that findings that rest on it cannot appear: {what}.")
        earlier = next((r for r in c.runs[:i] if r.run_id is not None and r.run_id == run.run_id), None)
        if earlier is not None:
            out.append(f"{run.label} is the same run as {earlier.label}.")
    if len({r.last_step for r in c.runs}) > 1:
        out.append(
            "The runs end at different steps: values are over each run's own steps, differences over the steps that "
            f"it shares with {base.label}."
        )
    return tuple(out)


def _names(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:NAMED])
    return shown + (f" and {len(labels) - NAMED} more" if len(labels) > NAMED else "")
