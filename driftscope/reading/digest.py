"""Sums that do not grow with the run: which steps were seen, and the distribution of a figure.

Both are mergeable, so that parts of a journal can be read side by side.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

EXACT = 4096
"""Values up to which a ``Digest`` keeps every one; its figures are then those of the list."""
RELATIVE_ERROR = 5e-4
"""Bound of the relative error of a median beyond that: half the width of a bin."""
_SCALE = 1.0 / math.log1p(2 * RELATIVE_ERROR)
_EDGE = 1e18  # magnitudes outside 1/_EDGE.._EDGE share the outermost bins; a bin answers with its values' mean
_PAGE = 12
_HIGHEST = sys.float_info.max
_LOWEST = -_HIGHEST

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class StepSet:
    """A set of step numbers, 1 bit each where they are dense."""

    pages: dict[int, int] = field(default_factory=dict)

    def add(self, step: int) -> None:
        """Put a step in."""
        page = step >> _PAGE
        self.pages[page] = self.pages.get(page, 0) | (1 << (step & ((1 << _PAGE) - 1)))

    def __contains__(self, step: int) -> bool:
        return bool(self.pages.get(step >> _PAGE, 0) >> (step & ((1 << _PAGE) - 1)) & 1)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self.pages.values())

    def merge(self, other: StepSet) -> None:
        """Put all steps of another set in."""
        for page, bits in other.pages.items():
            self.pages[page] = self.pages.get(page, 0) | bits


@dataclass
class _Bins:
    """Counts and sums of positive values in bins of equal relative width."""

    first: int = 0
    counts: Any = None
    sums: Any = None

    def add(self, values: Floats, weights: Floats | None = None) -> None:
        if not len(values):
            return
        keys = np.floor(np.log(np.clip(values, 1 / _EDGE, _EDGE)) * _SCALE).astype(np.int64)
        low, high = int(keys.min()), int(keys.max())
        keys -= low
        n = high - low + 1
        counts = np.bincount(keys, weights, n)
        sums = np.bincount(keys, values if weights is None else values * weights, n)
        self._put(low, counts, sums)

    def _put(self, low: int, counts: Any, sums: Any) -> None:
        high = low + len(counts)
        if self.counts is None:
            self.first, self.counts, self.sums = low, counts.astype(np.float64), sums.astype(np.float64)
            return
        first, end = min(self.first, low), max(self.first + len(self.counts), high)
        if (first, end) != (self.first, self.first + len(self.counts)):
            before, after = self.first - first, end - self.first - len(self.counts)
            self.counts = np.pad(self.counts, (before, after))
            self.sums = np.pad(self.sums, (before, after))
            self.first = first
        at = slice(low - self.first, high - self.first)
        self.counts[at] += counts
        self.sums[at] += sums

    def merge(self, other: _Bins) -> None:
        if other.counts is not None:
            self._put(other.first, other.counts, other.sums)

    @property
    def count(self) -> int:
        return 0 if self.counts is None else round(float(self.counts.sum()))

    def at(self, rank: int) -> float:
        """The value of that rank from below (from 0), as the mean of its bin."""
        place = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        place = min(place, len(self.counts) - 1)
        return float(self.sums[place] / self.counts[place])


class Digest:
    """Count, sum, extremes and median of one figure; exact up to ``EXACT`` values, then within ``RELATIVE_ERROR``."""

    __slots__ = ("_held", "_infinite", "_negative", "_positive", "_sum", "_zeros", "high", "low", "spilled")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._held: list[float] = list(values)
        self.spilled = 0
        self._sum = 0.0
        self._zeros = 0
        self._infinite = 0
        self.low: float | None = None
        self.high: float | None = None
        self._positive = _Bins()
        self._negative = _Bins()

    def add(self, value: float) -> None:
        """Take in one value. Zero, negative and infinite ones count too; NaN does not, in the long run."""
        held = self._held
        held.append(value)
        if len(held) > EXACT:
            self._spill()

    def add_finite(self, value: float | None) -> None:
        """Take in a value, if there is one and it is finite."""
        if value is not None and _LOWEST <= value <= _HIGHEST:
            held = self._held
            held.append(value)
            if len(held) > EXACT:
                self._spill()

    def extend(self, values: Sequence[float] | Floats) -> None:
        """Take in several values."""
        self._held.extend(values)
        if len(self._held) > EXACT:
            self._spill()

    def add_array(self, values: Floats) -> None:
        """Take in an array of finite values."""
        if not self.spilled and len(self._held) + len(values) <= EXACT:
            self._held.extend(values.tolist())
            return
        if self._held:
            self._spill()
        self._take(values)

    def repeat(self, value: float, times: int) -> None:
        """Take in one value several times."""
        if times > EXACT:
            self._spill()
            self._take(np.array([value]), times)
        elif times > 0:
            self.extend([value] * times)

    def merge(self, other: Digest) -> None:
        """Take in what another digest holds."""
        if other.spilled:
            self._spill()
            self.spilled += other.spilled
            self._sum += other._sum
            self._zeros += other._zeros
            self._infinite += other._infinite
            self._bounds(other.low, other.high)
            self._positive.merge(other._positive)
            self._negative.merge(other._negative)
        self.extend(other._held)

    @property
    def count(self) -> int:
        """Number of values."""
        return self.spilled + len(self._held)

    @property
    def exact(self) -> bool:
        """Whether the median is that of the values themselves."""
        return not self.spilled

    @property
    def not_positive(self) -> int:
        """Number of values that are zero or negative."""
        return self._zeros + self._negative.count + sum(v <= 0 for v in self._held)

    @property
    def total(self) -> float:
        """Sum of the values."""
        return self._sum + sum(self._held) if self.spilled else sum(self._held)

    def extremes(self) -> tuple[float, float] | None:
        """Lowest and highest value, ``None`` without any."""
        found = [v for v in (self.low, self.high) if v is not None] + self._held
        return (min(found), max(found)) if found else None

    def median(self) -> float | None:
        """The median; of an even number the mean of the middle two."""
        if not self.spilled:
            return median(self._held) if self._held else None
        self._spill()
        n = self.spilled
        low, high = self._at((n - 1) // 2), self._at(n // 2)
        return low if low == high else (low + high) / 2

    def _at(self, rank: int) -> float:
        for bins in (self._negative, None, self._positive):
            count = self._zeros if bins is None else bins.count
            if rank < count:
                if bins is None:
                    return 0.0
                return -bins.at(count - 1 - rank) if bins is self._negative else bins.at(rank)
            rank -= count
        return math.inf

    def _spill(self) -> None:
        held, self._held = self._held, []
        values = np.array(held, dtype=np.float64)
        values = values[~np.isnan(values)]
        infinite = int(np.isposinf(values).sum())
        self._infinite += infinite
        self.spilled += infinite
        if infinite:
            self._bounds(None, math.inf)
        self._take(values[np.isfinite(values)])

    def _take(self, values: Floats, times: int = 1) -> None:
        if not len(values):
            return
        self.spilled += len(values) * times
        self._sum += float(values.sum()) * times
        self._bounds(float(values.min()), float(values.max()))
        weights = np.full(len(values), float(times)) if times != 1 else None
        if self.low is not None and self.low > 0:
            self._positive.add(values, weights)
            return
        up, down = values > 0, values < 0
        self._positive.add(values[up], weights[up] if weights is not None else None)
        self._negative.add(-values[down], weights[down] if weights is not None else None)
        self._zeros += (len(values) - int(up.sum()) - int(down.sum())) * times

    def _bounds(self, low: float | None, high: float | None) -> None:
        if low is not None:
            self.low = low if self.low is None else min(self.low, low)
        if high is not None:
            self.high = high if self.high is None else max(self.high, high)
