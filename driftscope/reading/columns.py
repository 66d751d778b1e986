"""The figures of the step records as columns: gathered row by row, summed up block by block with numpy.

A column is named by the path of its field (``gap.grad_norm_ratio``, ``paths.liger.loss``). Of each the digest is kept;
of those that the report draws also the place of the lowest and the highest value in each stretch of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from driftscope.reading.digest import Digest

PACK, BLOCK = 128, 4096
"""Rows that become an array, and rows that are summed up, at a time."""
STRETCHES = 40
MAX_ROWS = 512
MAX_COLUMNS = 4096
"""Kinds of rows and columns that are kept; only a foreign file has more."""
DRAWN = re.compile(
    r"live_grad_norm|residual|gap\.(grad_norm_ratio|param_grad_norm_ratio)|is_ratio\.kept_mass|"
    r"paths\..*\.(loss|hidden_grad_norm|param_grad_norm|normalizer|normalizer_measured)|"
    r"is_ratio\.(raw|raw_token|applied)\.(mean|min|max)|drift\..*\.value|canary\.(rms|rest_rms)|"
    r"canary\.distances\..*|cadence\.spent|ranks\.(slowest_ms|median_ms)|"
    r"gradient\.(norm_ratio|cosine|difference)\.value|gradient\.bias\.size\.value",
    re.DOTALL,
)
"""Columns whose extremes the report keeps."""


@dataclass(frozen=True)
class Stretches:
    """The run cut into at most ``STRETCHES`` stretches of ``width`` optimizer steps from ``first`` on."""

    first: int = 1
    width: int = 1

    @classmethod
    def over(cls, first: int, last: int) -> Stretches:
        """Stretches of equal width from step ``first`` to step ``last``."""
        return cls(first, max(1, -(-(last - first + 1) // STRETCHES)))

    def of(self, step: int) -> int:
        """The stretch of a step; steps outside the run belong to the outermost ones."""
        return min(max((step - self.first) // self.width, 0), STRETCHES - 1)

    def reaches(self, step: int) -> bool:
        """Whether a step is inside the run as it is cut."""
        return step < self.first + self.width * STRETCHES

    def doubled(self) -> Stretches:
        """The same with stretches of twice the width."""
        return Stretches(self.first, 2 * self.width)

    def starts(self) -> list[int]:
        """First step of each stretch."""
        return [self.first + i * self.width for i in range(STRETCHES)]


class Column:
    """One figure over the run: its digest, and where its extremes stand, by stretch."""

    __slots__ = ("digest", "high", "high_at", "low", "low_at", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = Digest()
        self.low: list[float] | None = None
        if DRAWN.fullmatch(name):
            self.low, self.high = [np.inf] * STRETCHES, [-np.inf] * STRETCHES
            self.low_at, self.high_at = [-1] * STRETCHES, [-1] * STRETCHES

    def mark(self, at: int, values: Any, places: Any) -> None:
        """Take in the values of one stretch, NaN where there is none, and where they stand."""
        if self.low is None:
            return
        known = np.isfinite(values)
        if not known.any():
            return
        values, places = values[known], places[known]
        low, high = int(values.argmin()), int(values.argmax())
        self._mark(at, float(values[low]), int(places[low]), float(values[high]), int(places[high]))

    def _mark(self, at: int, low: float, low_at: int, high: float, high_at: int) -> None:
        assert self.low is not None
        if low < self.low[at]:
            self.low[at], self.low_at[at] = low, low_at
        if high > self.high[at]:
            self.high[at], self.high_at[at] = high, high_at

    def merge(self, other: Column) -> None:
        """Take in the same column of a later part of the run."""
        self.digest.merge(other.digest)
        if self.low is not None and other.low is not None:
            for at, (low, high) in enumerate(zip(other.low, other.high, strict=True)):
                self._mark(at, low, other.low_at[at], high, other.high_at[at])

    def widen(self) -> None:
        """Join the stretches two by two."""
        if self.low is None:
            return
        marks = list(zip(self.low, self.low_at, self.high, self.high_at, strict=True))
        self.low, self.high = [np.inf] * STRETCHES, [-np.inf] * STRETCHES
        self.low_at, self.high_at = [-1] * STRETCHES, [-1] * STRETCHES
        for at, (low, low_at, high, high_at) in enumerate(marks):
            self._mark(at // 2, low, low_at, high, high_at)

    def places(self) -> set[int]:
        """Where its extremes stand."""
        return set() if self.low is None else {place for place in (*self.low_at, *self.high_at) if place >= 0}


class Rows:
    """Rows of one kind, held until there are enough for numpy."""

    __slots__ = ("columns", "flat", "places", "steps", "tables")

    def __init__(self, columns: list[Column]) -> None:
        self.columns = columns
        self.flat: list[Any] = []
        self.tables: list[Any] = []
        self.steps: list[int] = []
        self.places: list[int] = []

    def add(self, row: Iterable[Any], step: int, place: int, stretches: Stretches) -> None:
        """Take in a row: a value for each column, ``None`` where there is none."""
        self.flat += row
        self.steps.append(step)
        self.places.append(place)
        if not len(self.steps) % PACK:  # while the values are still in the processor's cache
            self._pack()
            if len(self.steps) >= BLOCK:
                self.flush(stretches)

    def _pack(self) -> None:
        if self.flat:
            self.tables.append(_table(self.flat, len(self.columns)))
            self.flat = []

    def flush(self, stretches: Stretches) -> None:
        """Sum up the rows that are held."""
        if not self.steps:
            return
        self._pack()
        table = np.concatenate(self.tables).T
        at = np.array([stretches.of(step) for step in self.steps])
        edges = [0, *(np.flatnonzero(np.diff(at)) + 1).tolist(), len(at)]
        places = np.array(self.places, np.int64)
        for column, values in zip(self.columns, table, strict=True):
            known = values[np.isfinite(values)]
            if not len(known):
                continue
            column.digest.add_array(known)
            if column.low is not None:
                for start, end in pairwise(edges):
                    column.mark(int(at[start]), values[start:end], places[start:end])
        self.tables, self.steps, self.places = [], [], []


def _table(flat: list[Any], width: int) -> Any:
    try:
        table = np.array(flat, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        table = np.array([v if type(v) in (int, float) and abs(v) < 1e308 else None for v in flat], dtype=np.float64)
    return table.reshape(-1, width)


class Columns:
    """All columns of a run, made when a record first has them."""

    def __init__(self, stretches: Stretches) -> None:
        self.stretches = stretches
        self.by_name: dict[str, Column] = {}
        self.kinds: dict[Any, Rows] = {}

    def rows(self, kind: Any) -> Rows | None:
        """The rows of a kind that was seen before."""
        return self.kinds.get(kind)

    def new_rows(self, kind: Any, names: Iterable[str]) -> Rows:
        """The rows of a new kind, with the columns of those names."""
        rows = Rows([self._column(name) for name in names])
        if len(self.kinds) < MAX_ROWS:
            self.kinds[kind] = rows
        else:
            rows.columns = [Column("") for _ in rows.columns]  # never asked for
        return rows

    def add(self, prefix: str, keys: tuple[str, ...], row: Iterable[Any], step: int, place: int) -> None:
        """Take in the fields ``keys`` of the object ``prefix``."""
        rows = self.kinds.get((prefix, keys)) or self.new_rows((prefix, keys), [f"{prefix}.{key}" for key in keys])
        rows.add(row, step, place, self.stretches)

    def _column(self, name: str) -> Column:
        if name not in self.by_name and len(self.by_name) >= MAX_COLUMNS:
            return Column("")
        return self.by_name.setdefault(name, Column(name))

    def flush(self) -> None:
        """Sum up what is held."""
        for rows in self.kinds.values():
            rows.flush(self.stretches)

    def merge(self, other: Columns) -> None:
        """Take in a later part of the run, cut into the same stretches."""
        self.flush()
        other.flush()
        for name, column in other.by_name.items():
            self._column(name).merge(column)

    def widen(self) -> None:
        """Join the stretches two by two."""
        self.flush()
        self.stretches = self.stretches.doubled()
        for column in self.by_name.values():
            column.widen()

    def places(self) -> set[int]:
        """Where the extremes of all drawn columns stand."""
        self.flush()
        return {place for column in self.by_name.values() for place in column.places()}
