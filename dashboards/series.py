"""Records turned into lines: micro-batches gathered by optimizer step, long runs thinned without losing an extreme.

Of a run that is too long to be held, ``Thinned`` stands for the list of its records: it is the list of those that are
shown, and knows the figures of all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from driftscope.records import StepRecord

if TYPE_CHECKING:
    from driftscope.reading.digest import Digest
    from driftscope.reading.summary import Summary

POINT_LIMIT = 800
Getter = Callable[[StepRecord], float | None]


def finite(value: float | None) -> float | None:
    """``value`` if it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Field:
    """A getter for one figure of a record, by the names that lead to it; ``None`` where one of them is missing."""

    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The path of the figure, under which ``Summary.figures`` has it."""
        return ".".join(self.parts)

    def __call__(self, record: StepRecord) -> float | None:
        value: Any = record
        for part in self.parts:
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
            if value is None:
                return None
        return value  # type: ignore[no-any-return]


def getter(*parts: str) -> Field:
    """A getter for a figure: ``getter("gap", "cosine")``, or in short ``getter("gap.cosine")``."""
    return Field(tuple(parts) if len(parts) > 1 else tuple(parts[0].split(".")))


class Thinned(list[StepRecord]):
    """The records of a long run that are shown. Medians, extremes and sums of a ``Field`` are those of all records."""

    def __init__(self, summary: Summary) -> None:
        super().__init__(summary.kept())
        self.summary = summary

    @property
    def complete(self) -> bool:
        """Whether no record is left out."""
        return len(self) == self.summary.records


def whole_of(steps: Sequence[StepRecord]) -> Summary | None:
    """The run that ``steps`` stand for, where they are not all of its records."""
    return steps.summary if isinstance(steps, Thinned) else None


def _digest(steps: object, get: Getter) -> Digest | None:
    """The figures of the whole run, where ``steps`` stand for one and ``get`` is a ``Field``."""
    if not isinstance(steps, Thinned) or not isinstance(get, Field):
        return None
    from driftscope.reading.digest import Digest

    return steps.summary.figures.get(get.name) or Digest()


def extremes(steps: Sequence[StepRecord], get: Getter) -> tuple[float, float] | None:
    """Lowest and highest value of ``get``; None where no record has a value."""
    digest = _digest(steps, get)
    if digest is not None:
        return digest.extremes()
    found = values(steps, get)
    return (min(found), max(found)) if found else None


def total(steps: Sequence[StepRecord], get: Getter) -> float:
    """Sum of the values of ``get``."""
    digest = _digest(steps, get)
    return sum(values(steps, get)) if digest is None else digest.total


def values(steps: Iterable[StepRecord], get: Getter) -> list[float]:
    """The finite values of ``get`` over ``steps``."""
    found = (finite(get(s)) for s in steps)
    return [v for v in found if v is not None]


def middle(steps: Iterable[StepRecord], get: Getter) -> float | None:
    """The median of ``get`` over ``steps``; None where no record has a value."""
    digest = _digest(steps, get)
    if digest is not None:
        return digest.median()
    found = values(steps, get)
    return median(found) if found else None


@dataclass(frozen=True)
class Line:
    """One curve over optimizer steps: the median over a step's micro-batches and their lowest and highest value.

    ``mid[i]`` is None where no micro-batch of step ``x[i]`` has a value: a hole in the line. ``dropped`` counts values
    that a logarithmic axis cannot show (zero or negative).
    """

    x: list[float]
    mid: list[float | None]
    low: list[float | None]
    high: list[float | None]
    dropped: int = 0

    @property
    def empty(self) -> bool:
        """True where no step has a value."""
        return all(v is None for v in self.mid)

    @property
    def has_band(self) -> bool:
        """True where some step's micro-batches differ visibly (by more than 1%)."""
        return any(
            lo is not None and hi is not None and hi > lo + 0.01 * max(abs(lo), abs(hi))
            for lo, hi in zip(self.low, self.high, strict=True)
        )


def by_step(steps: Sequence[StepRecord], get: Getter, *, log: bool = False) -> Line:
    """``get`` gathered by optimizer step. With ``log``, values that are not positive are dropped and counted.

    A step between two measured ones (tier "light") is no hole: it was never meant to have the value.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    dropped = 0
    for record in steps:
        value = finite(get(record))
        if value is None and record.tier == "light":
            continue
        bucket = groups[record.step]
        if value is not None and log and value <= 0:
            dropped += 1
        elif value is not None:
            bucket.append(value)
    if log and (digest := _digest(steps, get)) is not None:
        dropped = digest.not_positive
    line = Line(x=[], mid=[], low=[], high=[], dropped=dropped)
    for step in sorted(groups):
        found = groups[step]
        line.x.append(step)
        line.mid.append(median(found) if found else None)
        line.low.append(min(found) if found else None)
        line.high.append(max(found) if found else None)
    return line


def thin(line: Line, limit: int = POINT_LIMIT) -> Line:
    """At most about ``limit`` points of ``line``; of each stretch, its extremes and its holes are kept."""
    n = len(line.x)
    if n <= limit:
        return line
    buckets = max(1, limit // 5)
    keep = {0, n - 1}
    for b in range(buckets):
        where = range(b * n // buckets, (b + 1) * n // buckets)
        keep.update(_extremes(line, where))
    return _picked(line, sorted(keep))


def thin_together(lines: Sequence[Line], limit: int = POINT_LIMIT, *, lead: int | None = None) -> list[Line]:
    """``thin`` for lines over the same steps: of each, the same steps are kept.

    The extremes of the first ``lead`` lines (default: all) are among them. Bands are not looked at.
    """
    if not lines or len(lines[0].x) <= limit:
        return list(lines)
    leading = lines[: lead or len(lines)]
    n, buckets = len(lines[0].x), max(1, limit // (2 * len(leading) + 1))
    keep = {0, n - 1}
    for b in range(buckets):
        where = range(b * n // buckets, (b + 1) * n // buckets)
        for line in leading:
            known = [(v, i) for i in where if (v := line.mid[i]) is not None]
            holes = [i for i in where if line.mid[i] is None]
            keep.update([min(known)[1], max(known)[1], *holes[:1]] if known else holes[:1])
    return [_picked(line, sorted(keep)) for line in lines]


def _picked(line: Line, order: Sequence[int]) -> Line:
    return Line(
        x=[line.x[i] for i in order],
        mid=[line.mid[i] for i in order],
        low=[line.low[i] for i in order],
        high=[line.high[i] for i in order],
        dropped=line.dropped,
    )


def _extremes(line: Line, where: Sequence[int]) -> set[int]:
    picked = set()
    for column in (line.mid, line.low, line.high):
        known = [(v, i) for i in where if (v := column[i]) is not None]
        if known and column is not line.high:
            picked.add(min(known)[1])
        if known and column is not line.low:
            picked.add(max(known)[1])
    holes = [i for i in where if line.mid[i] is None]
    return picked | set(holes[:1])


def paths_in(steps: Iterable[StepRecord]) -> list[str]:
    """Names of the paths that some record holds, in their usual order."""
    from driftscope.dashboards.wording import ordered_paths

    return ordered_paths(name for s in steps for name in s.paths)


def path_value(name: str, figure: str) -> Getter:
    """A getter for one figure of one path: None where the path is absent."""
    return Field(("paths", name, figure))


def pair(steps: Sequence[StepRecord]) -> tuple[str, str]:
    """(candidate, reference): the names that the latest gap compares; the usual two where there is no gap."""
    for record in reversed(steps):
        if record.gap is not None:
            return record.gap.candidate, record.gap.reference
    return "liger", "reference"


def why_unavailable(steps: Sequence[StepRecord], *signals: str) -> str | None:
    """The latest recorded reason for one of ``signals`` (exact name, or a prefix up to a dot), if any."""
    for record in reversed(steps):
        for name in sorted(record.unavailable):
            if any(name == s or name.startswith(f"{s}.") for s in signals):
                return record.unavailable[name]
    return None
