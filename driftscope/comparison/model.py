"""What is kept of a run, and what a comparison holds. Plain frozen data: terminal, page and JSON show the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from driftscope.comparison.figures import Figure
from driftscope.records import Severity

Mark = Literal[
    "baseline", "better", "worse", "differs", "within", "too_few", "unavailable", "other_paths", "not_judged"
]
MARKED: tuple[Mark, ...] = ("better", "worse", "differs")
Change = Literal["none", "baseline", "same", "new", "gone", "worse", "better", "unknown"]


@dataclass(frozen=True)
class Series:
    """One figure by optimizer step, ascending: the median over the records of a step."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RuleFound:
    """One rule's findings in one run."""

    rule: str
    severity: Severity
    title: str
    first_step: int
    count: int
    judged: bool = True
    """False for a fact about the stack that no level counts."""


@dataclass(frozen=True, kw_only=True)
class RunColumn:
    """One run without its records. ``None`` and missing keys are unavailable.

    series: figure id -> evenly thinned, what differences are judged on. lines: the same thinned so that extremes
    stay, what is drawn. dropped: steps that a line lacks because a logarithmic axis cannot show them. scalars: figures
    of the run as a whole. attributed: steps at which the causes of the gap were sought. settings: section -> name ->
    value as text; empty without a readable run.json.
    """

    path: Path
    label: str
    run_id: str | None = None
    status: str | None = None
    level: str = "unavailable"
    headline: str = ""
    records: int = 0
    first_step: int | None = None
    last_step: int | None = None
    measured_steps: int = 0
    processes: int | None = None
    live: str | None = None
    pair: tuple[str, str] | None = None
    findings: tuple[RuleFound, ...] = ()
    series: dict[str, Series] = field(default_factory=dict)
    lines: dict[str, Series] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    attributed: tuple[int, ...] = ()
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of one run against the baseline.

    change: candidate / baseline for a figure on a logarithmic scale, candidate - baseline on a linear one; the median
    over the paired steps. bar: what ``change`` had to exceed, in the same form. pairs: steps paired; independent: how
    many independent ones they are worth.
    """

    value: float | None = None
    change: float | None = None
    bar: float | None = None
    pairs: int = 0
    independent: float = 0.0
    mark: Mark = "unavailable"


@dataclass(frozen=True)
class FigureRow:
    """One figure over all runs, in the order of the columns."""

    figure: Figure
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class SettingRow:
    """One setting on which runs differ; ``None`` where it is not recorded."""

    section: str
    name: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class FindingCell:
    """One rule in one run, and what that is against the baseline.

    late: the first step of the finding is one that the run without it never reached. chance: it fired on so few steps
    that one rate in both runs explains that it is in one of them only.
    """

    found: RuleFound | None
    change: Change
    late: bool = False
    chance: bool = False


@dataclass(frozen=True)
class FindingRow:
    """One rule over all runs."""

    rule: str
    title: str
    cells: tuple[FindingCell, ...]


@dataclass(frozen=True)
class Skipped:
    """A run that could not be read, and why."""

    path: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side. ``baseline`` is an index into ``runs``."""

    runs: tuple[RunColumn, ...]
    baseline: int
    headline: str
    sentences: tuple[str, ...]
    settings: tuple[SettingRow, ...]
    figures: tuple[FigureRow, ...]
    findings: tuple[FindingRow, ...]
    skipped: tuple[Skipped, ...] = ()
    replicates: tuple[tuple[int, ...], ...] = ()
    """Runs with the same configuration but for the seed, as indices."""
    notes: tuple[str, ...] = ()
