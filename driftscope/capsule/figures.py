"""How far a record computed again is from the saved one, figure by figure.

Two machines round differently. A figure is the same when it differs by no more than ``ROUNDING`` times the precision
of the dtype that the head computed in: relative to the saved value, or absolutely for shares, cosines and relative
errors, which are differences of nearly equal numbers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from driftscope.records import StepRecord

ROUNDING = 4.0
LEAST = 1e-5
"""Smallest relative difference that is not rounding: sums over a vocabulary in float32, in another order."""
TINY = 1e-9
SECTIONS = ("paths", "gap", "is_ratio", "mismatch", "causes", "unexplained", "residual", "scatter")
CARRIED = ("param_grad_norm", "param_grad_norm_ratio", "fused_call_error")
ABSOLUTE = ("coef_error", "residual", "noise_floor", "cosine", "share")


@dataclass(frozen=True)
class Figure:
    """One number, saved and computed again. ``difference``: as ``allowed``; ``None`` where one of them is missing."""

    name: str
    saved: float | None
    again: float | None
    difference: float | None
    allowed: float
    relative: bool

    @property
    def same(self) -> bool:
        """Whether the two are the same to rounding; two that are both unavailable are."""
        if self.difference is None:
            return self.saved is None and self.again is None
        return self.difference <= self.allowed


def compare_records(saved: StepRecord, again: StepRecord, *, eps: float, loss_scale: float) -> list[Figure]:
    """Every figure that is computed again, in the record's order.

    eps: of the dtype that the head computed in. loss_scale: what a loss is a small difference of.
    """
    rounding = max(ROUNDING * eps, LEAST)
    old, new = dict(_numbers(saved)), dict(_numbers(again))
    skipped = {f"paths.{saved.live}.loss"}
    if saved.canary is not None:
        skipped |= {name for name in old | new if name.startswith("is_ratio.causes")}
    out = []
    for name in dict.fromkeys((*old, *new)):
        last = name.rpartition(".")[2]
        if name in skipped or last in CARRIED:
            continue
        scale = loss_scale if last in ("loss", "loss_diff") else None
        out.append(_figure(name, old.get(name), new.get(name), rounding, scale))
    return _scatter_as_one(out)


def _figure(name: str, saved: float | None, again: float | None, rounding: float, scale: float | None) -> Figure:
    absolute = name.rpartition(".")[2] in ABSOLUTE or name.startswith("unexplained.")
    if saved is None or again is None:
        return Figure(name, saved, again, None, rounding, not absolute)
    difference = abs(saved - again)
    if absolute:
        return Figure(name, saved, again, difference, rounding, False)
    size = max(abs(saved), scale or 0.0)
    difference = max(difference - TINY * min(size, 1.0), 0.0)
    return Figure(name, saved, again, difference / size if size > 0 else difference, rounding, True)


def _numbers(record: StepRecord) -> Iterator[tuple[str, float | None]]:
    """Dotted name and value of every number of the sections that are computed again; causes by their id."""
    data = record.model_dump(include=set(SECTIONS), warnings=False)
    for section in SECTIONS:
        yield from _walk(section, data.get(section))


def _walk(name: str, value: Any) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("id", "detail", "note", "source", "mode", "level", "candidate_name"):
                yield from _walk(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            label = inner["id"] if isinstance(inner, dict) and "id" in inner else str(i)
            yield from _walk(f"{name}.{label}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value) if math.isfinite(value) else None
    elif value is None:
        yield name, None


def _scatter_as_one(figures: list[Figure]) -> list[Figure]:
    """The points of the scatter as one figure: the largest difference, relative to the largest coefficient."""
    points = [f for f in figures if f.name.startswith("scatter.")]
    rest = [f for f in figures if not f.name.startswith("scatter.")]
    if not points:
        return rest
    sizes: dict[str, float] = {}
    for f in points:
        column = f.name.rpartition(".")[2]
        sizes[column] = max(sizes.get(column, 0.0), abs(f.saved or 0.0))
    if any((f.saved is None) != (f.again is None) for f in points):
        return [*rest, Figure("scatter", float(len(points)), None, None, points[0].allowed, True)]
    worst = max(abs((f.saved or 0.0) - (f.again or 0.0)) / (sizes[f.name.rpartition(".")[2]] or 1.0) for f in points)
    return [*rest, Figure("scatter", 0.0, worst, worst, points[0].allowed, True)]
