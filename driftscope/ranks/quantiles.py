"""Quantiles of several samples together, from the quantiles of each."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

_STEPS = 200


def mixture_quantiles(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Quantiles ``p01`` ... of all samples together.

    parts: ``count``, ``min``, ``max`` and the same quantiles of each sample. Between its known quantiles a sample
    counts as spread evenly; the result is off by no more than the distance between two neighbouring ones.
    """
    levels = [int(name[1:]) / 100 for name in names]
    knots = [([p["min"], *(p[n] for n in names), p["max"]], [0.0, *levels, 1.0], p["count"]) for p in parts]
    knots = [k for k in knots if all(map(math.isfinite, k[0])) and k[2] > 0]
    if not knots:
        return {}
    total = sum(count for *_, count in knots)
    low, high = min(k[0][0] for k in knots), max(k[0][-1] for k in knots)

    def below(x: float) -> float:
        return sum(_share(x, at, level) * count for at, level, count in knots) / total

    return {name: _invert(below, level, low, high) for name, level in zip(names, levels, strict=True)}


def _share(x: float, at: Sequence[float], level: Sequence[float]) -> float:
    """The piecewise linear distribution function at ``x``."""
    i = bisect_right(at, x)
    if i == 0:
        return 0.0
    if i == len(at):
        return 1.0
    width = at[i] - at[i - 1]
    return level[i - 1] + (level[i] - level[i - 1]) * (x - at[i - 1]) / width if width > 0 else level[i]


def _invert(below: Callable[[float], float], level: float, low: float, high: float) -> float:
    for _ in range(_STEPS):
        middle = low + (high - low) / 2
        if middle in (low, high):
            break
        if below(middle) < level:
            low = middle
        else:
            high = middle
    return high
