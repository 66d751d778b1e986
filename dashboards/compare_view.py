"""Runs side by side as grids of text, the same for terminal and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from driftscope.comparison.differences import MIN_PAIRS
from driftscope.comparison.figures import CAUSE_PREFIX, Figure
from driftscope.comparison.model import MARKED, Cell, Comparison, FindingCell, RunColumn
from driftscope.dashboards.wording import UNAVAILABLE, cause_label, clean, count, factor, number, path_label, percent

CUT = 300
LEVEL_WORDS = {
    "clean": "Clean", "info": "No warning", "warning": "Warning", "critical": "Critical",
    "unavailable": "Not measured",
}  # fmt: skip
SYMBOLS = {"better": "▲", "worse": "▼", "differs": "≠"}
CHANGES = {
    "new": "new", "gone": "gone", "worse": "more severe", "better": "less severe", "same": "as in the baseline",
    "unknown": "cannot be told",
}  # fmt: skip
HOW = (
    "At every step that a run shares with the baseline the difference of the two is taken, as a ratio where the "
    "figure is one. A figure is marked (▲ nearer to what an honest run has, ▼ further away, ≠ neither) where the "
    "median difference exceeds three things: the spread of these differences from step to step (1.4826 × MAD), "
    "widened where the steps are few or hang together (Student's t at 1% for the whole comparison, over the "
    "independent steps that they are worth); the figure's own floor (1% of a gradient norm, three times the measured "
    "noise floor of a gap); and what lies between runs of one configuration, where such runs are among these. Under "
    f"{MIN_PAIRS} shared steps nothing is marked: too few to tell. Not marked does not mean equal. Extremes, times "
    "and costs are shown and never marked."
)


@dataclass(frozen=True)
class Box:
    """One cell: text, a second line, and a mark (better, worse, differs) that the reader must not miss."""

    text: str = UNAVAILABLE
    detail: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Grid:
    """A table with a heading for each row. ``numeric``: its values are numbers, set right-aligned."""

    caption: str
    corner: str
    columns: list[str]
    headings: list[str]
    rows: list[list[Box]] = field(default_factory=list)
    numeric: bool = False

    def turned(self) -> Grid:
        """Rows as columns."""
        rows = [list(column) for column in zip(*self.rows, strict=True)]
        return Grid(self.caption, "Run", self.headings, self.columns, rows, self.numeric)

    def part(self, chosen: Sequence[int]) -> Grid:
        """Only these columns."""
        rows = [[row[i] for i in chosen] for row in self.rows]
        return Grid(self.caption, self.corner, [self.columns[i] for i in chosen], self.headings, rows, self.numeric)


def labels(c: Comparison) -> list[str]:
    """The columns' headings; the baseline says that it is."""
    return [clean(r.label) + (" (baseline)" if i == c.baseline else "") for i, r in enumerate(c.runs)]


def overview(c: Comparison) -> Grid:
    """A run a row: verdict, length, what trains, and how it stands to the baseline."""
    rows = [
        [
            Box(LEVEL_WORDS.get(run.level, clean(run.level)), "", run.level),
            Box(_length(run)),
            Box(path_label(run.live) if run.live is not None else UNAVAILABLE),
            _standing(c, index),
        ]
        for index, run in enumerate(c.runs)
    ]
    return Grid("The runs", "Run", ["Verdict", "Steps", "Path that trains", "Against the baseline"], labels(c), rows)


def settings_grid(c: Comparison) -> Grid | None:
    """The settings that differ, a row each; a value other than the baseline's is marked."""
    if not c.settings:
        return None
    headings, rows = [], []
    for row in c.settings:
        base = row.values[c.baseline]
        headings.append(f"{clean(row.name)} ({row.section.lower()})")
        rows.append(
            [
                Box("not recorded" if value is None else _cut(value), "", "" if value in (base, None) else "other")
                for value in row.values
            ]
        )
    return Grid("What differs in the configurations", "Setting", labels(c), headings, rows)


def figures_grid(c: Comparison) -> Grid | None:
    """A figure a row: value, and against the baseline what is more than the runs' own spread."""
    if not c.figures:
        return None
    headings = [figure_label(row.figure) for row in c.figures]
    rows = [[figure_box(row.figure, cell) for cell in row.cells] for row in c.figures]
    return Grid("Figures, medians over the steps of each run", "Figure", labels(c), headings, rows, True)


def findings_grid(c: Comparison) -> Grid | None:
    """A rule a row: severity and steps in each run, and whether it is new, gone or changed."""
    if not c.findings:
        return None
    headings = [f"{clean(row.rule)} {_cut(row.title, 90)}" for row in c.findings]
    rows = [[finding_box(cell, c.runs[i]) for i, cell in enumerate(row.cells)] for row in c.findings]
    return Grid("Findings by rule", "Rule", labels(c), headings, rows)


def figure_label(figure: Figure) -> str:
    """A figure in words; a cause by its reader's name."""
    if figure.id.startswith(CAUSE_PREFIX):
        return f"Factor of the cause: {cause_label(figure.id.removeprefix(CAUSE_PREFIX))}"
    return figure.label


def value_text(figure: Figure, value: float | None) -> str:
    """A value with its unit."""
    if value is None:
        return UNAVAILABLE
    texts: dict[str, Callable[[float], str]] = {
        "x": factor,
        "share": percent,
        "ms": lambda v: f"{number(v)} ms",
        "steps": lambda v: f"{v:,.0f}",
        "records": lambda v: f"{v:,.0f}",
        "processes": lambda v: f"{v:,.0f}",
        "nats": lambda v: f"{number(v)} nats",
    }
    return texts.get(figure.unit, number)(value)


def change_text(figure: Figure, cell: Cell) -> str:
    """The change against the baseline; nothing where a ratio to a rounding error would say nothing."""
    if cell.change is None:
        return ""
    if figure.scale == "log":
        return f"×{number(cell.change)}"
    return f"{'+' if cell.change > 0 else ''}{number(cell.change)}"


def figure_box(figure: Figure, cell: Cell) -> Box:
    """One figure of one run."""
    text = value_text(figure, cell.value)
    if cell.mark in MARKED:
        word = cell.mark if cell.mark != "differs" else "differs"
        parts = [f"{SYMBOLS[cell.mark]} {word}", change_text(figure, cell)]
        return Box(text, ", ".join(p for p in parts if p), cell.mark)
    said = {
        "too_few": f"too few to tell ({count(cell.pairs, 'shared step')})",
        "other_paths": "compares other paths",
    }.get(cell.mark, "")
    return Box(text, said if cell.value is not None else "")


def finding_box(cell: FindingCell, run: RunColumn) -> Box:
    """One rule in one run."""
    found = cell.found
    said = CHANGES.get(cell.change, "")
    if cell.late:
        said += ", after the other's last step" if found is not None else ": the run ended before"
    if cell.chance:
        said += ", may be chance"
    mark = {"new": "worse", "worse": "worse", "gone": "better", "better": "better"}.get(cell.change, "")
    if found is None:
        return Box("not measured" if run.level == "unavailable" else "none", said, mark)
    if not found.judged:
        return Box(found.severity, said, "")
    where = f"{found.severity}, {count(found.count, 'step')} from {found.first_step:,}"
    return Box(where, "" if cell.change == "same" else said, mark)


def _length(run: RunColumn) -> str:
    if run.last_step is None:
        return "no step on record"
    return f"{run.last_step:,}, {run.measured_steps:,} measured"


def _standing(c: Comparison, index: int) -> Box:
    if index == c.baseline:
        return Box("baseline")
    marks = [row.cells[index].mark for row in c.figures]
    parts = [
        f"{count(marks.count(mark), 'figure')} {word}"
        for mark, word in (("worse", "worse"), ("better", "better"), ("differs", "different"))
        if mark in marks
    ]
    for change, word in (("new", "new"), ("worse", "more severe"), ("better", "less severe"), ("gone", "gone")):
        rules = [clean(row.rule) for row in c.findings if row.cells[index].change == change]
        if rules:
            parts.append(f"{word}: {', '.join(rules)}")
    if not parts:
        told = "within" in marks
        return Box("no difference beyond the runs' own spread" if told else "too few shared steps to tell")
    return Box("; ".join(parts))


def _cut(text: str, limit: int = CUT) -> str:
    text = " ".join(clean(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
