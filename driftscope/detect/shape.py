"""A step or a ramp? Least squares over a short stretch, used when an alarm is told and by the trend detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple


class Fit(NamedTuple):
    """A fitted shape: sum of squared residuals, index at which the change begins, value before it and at the end."""

    error: float
    start: int
    before: float
    after: float


def _deviation(values: Sequence[float]) -> float:
    middle = fmean(values)
    return math.fsum((v - middle) ** 2 for v in values)


def fit_step(values: Sequence[float], *, skip: int = 0) -> Fit:
    """The best step between two levels, from more than ``skip + 1`` values (O(n^2); n is at most 64 here).

    ``skip``: values at the step that may lie anywhere, where a value is the mean of a block that the step may divide.
    """
    fits = (
        Fit(_deviation(values[:k]) + _deviation(values[k + skip :]), k, fmean(values[:k]), fmean(values[k + skip :]))
        for k in range(1, len(values) - skip)
    )
    return min(fits)


def fit_ramp(values: Sequence[float]) -> Fit:
    """The best line that is flat until ``start`` and rises or falls from there to the end."""
    return min(_hinge(values, k) for k in range(len(values) - 2))


def _hinge(values: Sequence[float], start: int) -> Fit:
    slope, intercept, error = line([max(0, i - start) for i in range(len(values))], values)
    return Fit(error, start, intercept, intercept + slope * (len(values) - 1 - start))


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and sum of squared residuals of the least-squares line."""
    x_mean, y_mean = fmean(xs), fmean(ys)
    sxx = math.fsum((x - x_mean) ** 2 for x in xs)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sxx
    intercept = y_mean - slope * x_mean
    return slope, intercept, math.fsum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
