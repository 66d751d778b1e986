"""Is a difference between two runs more than what moves within them? Pure arithmetic on two series.

Steps that both runs have are paired, and the difference is taken at each: what both runs do alike (warm-up, a falling
learning rate) leaves it alone. With d the paired differences (logs for a ratio's scale),

    spread s = max(1.4826 MAD(d), half the distance between the 16th and the 84th percentile of d)
    worth    n' = max(4, n (1 - r) / (1 + r)),   r = lag-1 rank autocorrelation q of d + 2 sqrt((1 - q^2) / n)
    bar      = max(s max(1, 1.2533 t / sqrt(n')), floor)

and the difference is marked where |median(d)| > bar. t is Student's quantile with n' - 1 degrees of freedom at a level
that makes one mark by chance in ``FAMILY_LEVEL`` of all comparisons, however many figures and runs stand in one
(Bonferroni); 1.2533 is the standard error of a median over that of a mean. With many steps the first term is the
spread itself: a difference smaller than one step's scatter is never marked. Simulated false marks of one figure among
13, no floor: at most 0.03% for independent steps; for a lag-1 autocorrelation of 0.5 at most 0.15%, of 0.9 1.6% at 8
steps, 0.3% at 24 and 0.1% at 60.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist, median

from driftscope.comparison.model import Series

MIN_PAIRS = 8
MIN_INDEPENDENT = 4.0
FAMILY_LEVEL = 0.01
MEDIAN_OVER_MEAN = 1.2533  # sqrt(pi / 2)


@dataclass(frozen=True)
class Difference:
    """The paired difference b - a of two series, and the bar that it had to exceed (``None``: too few to tell)."""

    median: float | None
    bar: float | None
    pairs: int
    independent: float

    @property
    def exceeds(self) -> bool:
        """Whether it is more than what moves within the runs."""
        return self.median is not None and self.bar is not None and abs(self.median) > self.bar


def difference(a: Series, b: Series, *, floor: float, tests: int) -> Difference:
    """``b`` against ``a``, both already on the scale where differences are taken. tests: how many are made in all."""
    d = paired(a, b)
    if not d:
        return Difference(None, None, 0, 0.0)
    middle = median(d)
    worth = independent(d)
    if len(d) < MIN_PAIRS:
        return Difference(middle, None, len(d), worth)
    t = student(FAMILY_LEVEL / max(1, tests), int(worth) - 1)
    bar = max(spread(d) * max(1.0, MEDIAN_OVER_MEAN * t / math.sqrt(worth)), floor)
    return Difference(middle, bar, len(d), worth)


def paired(a: Series, b: Series) -> list[float]:
    """b - a at the steps of the sparser series; the other one's nearest step stands in where it has not the same.

    Only steps that both runs reached count, and none is paired with one further away than its own series' stride.
    """
    if not a or not b:
        return []
    first, last = max(a.steps[0], b.steps[0]), min(a.steps[-1], b.steps[-1])
    inside = [sum(first <= step <= last for step in s.steps) for s in (a, b)]
    flip = inside[1] > inside[0]
    sparse, dense = (a, b) if flip else (b, a)
    reach = max((q - p for p, q in pairwise(dense.steps)), default=0) / 2
    out, at = [], 0
    for step, value in zip(sparse.steps, sparse.values, strict=True):
        if not first <= step <= last:
            continue
        while at + 1 < len(dense) and abs(dense.steps[at + 1] - step) <= abs(dense.steps[at] - step):
            at += 1
        if abs(dense.steps[at] - step) <= reach:
            out.append(dense.values[at] - value if flip else value - dense.values[at])
    return out


def spread(d: Sequence[float]) -> float:
    """A robust standard deviation that a majority of equal values does not bring to zero."""
    middle = median(d)
    ordered = sorted(d)
    high, low = (ordered[min(len(d) - 1, round(q * (len(d) - 1)))] for q in (0.8413, 0.1587))
    return max(1.4826 * median(abs(v - middle) for v in d), (high - low) / 2)


def independent(d: Sequence[float]) -> float:
    """How many independent values a series is worth: ``n'`` above, at most its length."""
    n = len(d)
    if n <= MIN_INDEPENDENT:
        return float(n)
    ranks = _ranks(d)
    mean = (n - 1) / 2
    variance = sum((r - mean) ** 2 for r in ranks)
    if variance == 0:
        return float(n)
    r = sum((p - mean) * (q - mean) for p, q in pairwise(ranks)) / variance
    r = min(max(r + 2 * math.sqrt((1 - r * r) / n), 0.0), 0.999)
    return max(MIN_INDEPENDENT, n * (1 - r) / (1 + r))


def _ranks(d: Sequence[float]) -> list[float]:
    """Ranks from 0, equal values sharing their mean rank."""
    order = sorted(range(len(d)), key=d.__getitem__)
    ranks = [0.0] * len(d)
    start = 0
    for end in range(1, len(d) + 1):
        if end == len(d) or d[order[end]] != d[order[start]]:
            for i in order[start:end]:
                ranks[i] = (start + end - 1) / 2
            start = end
    return ranks


@cache
def student(level: float, freedom: int) -> float:
    """The t that |Student's t| of that many degrees of freedom exceeds with probability ``level``."""
    if freedom > 300:
        return -NormalDist().inv_cdf(level / 2)
    low, high = 0.0, 1.0
    while _beyond(high, freedom) > level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, freedom) > level else (low, middle)
    return high


def _beyond(t: float, freedom: int) -> float:
    """P(|T| > t) for Student's T, by the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    term, total, start = (cosine, 0.0, 1) if freedom % 2 else (1.0, 0.0, 0)
    for k in range(start, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if freedom % 2 else inside)
