"""A slow trend: the means of blocks of steps lie on a line that rises or falls.

A line is fitted to the last 6 to 32 block means. Its slope is judged by their residuals from it, and, since few means
tell little about their own scatter, also by the larger of that and what the noise's long-run variance allows. The
trend itself swells the latter, so either may speak. Where a step between two levels fits better it is no trend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from driftscope.detect.alarm import Alarm, positive, whole
from driftscope.detect.base import Detector
from driftscope.detect.baseline import BaselineSettings, clipped
from driftscope.detect.shape import fit_step, line

# Blocks that a line is fitted to, and the t that its slope exceeds with probability 1e-6 (two-sided, span - 2 degrees
# of freedom) where the residuals are the only measure of the noise.
SPANS = {6: 49.5, 8: 20.0, 12: 10.5, 16: 8.2, 24: 6.7, 32: 6.1}
LONGEST = max(SPANS)
MIN_VARIANCE = 1e-6  # of what the long-run variance allows: a perfect line is judged by no less
CLIP = 3.0  # standard deviations from its block's median that a value counts at most


@dataclass(frozen=True, kw_only=True)
class TrendSettings:
    """When a slope is a trend. Raises ``UsageError`` for a value outside its domain."""

    threshold: float = 5.5
    """Standard errors of the slope."""
    block: int = 16
    """Steps whose mean is one point of the line."""
    release: float = 0.5
    """Armed again once the score is below this share of the threshold."""
    cooldown: int = 64
    """Least steps between two alarms."""

    def __post_init__(self) -> None:
        positive(self, threshold=1.0, release=0.0)
        whole(self, block=2, cooldown=0)


class _Line(NamedTuple):
    score: float
    fits: bool
    """It rises or falls by more than the floor and leaves less than a step between two levels does."""
    span: int
    first: float
    last: float


_NONE = _Line(0.0, False, 0, 0.0, 0.0)


class TrendDetector(Detector[TrendSettings]):
    """Looks once a block at the last 96 to 512 steps (with blocks of 16)."""

    SETTINGS = TrendSettings
    STATE = ("armed", "block", "seen", "begun", "means", "starts")

    def __init__(
        self, settings: TrendSettings | None = None, *, floor: float = 0.0, baseline: BaselineSettings | None = None
    ) -> None:
        super().__init__(settings, floor=floor, baseline=baseline)
        self.armed = True
        self.block: list[float] = []
        self.seen = 0  # steps of the block, missing ones too
        self.begun = 0  # first step of the block
        self.means: list[float] = []
        self.starts: list[int] = []

    def _take(self, step: int, x: float | None) -> Alarm | None:
        self.baseline.push(x)
        if self.seen == 0:
            self.begun = step
        self.seen += 1
        if x is not None:
            self.block.append(x)
        if self.seen < self.settings.block:
            return None
        values, self.block, self.seen = self.block, [], 0
        if 2 * len(values) < self.settings.block:
            return None  # a block that is mostly missing says nothing
        middle = median(values)
        limit = CLIP * self.baseline.spread if self.baseline.ready else math.inf
        self.means.append(middle + fmean(clipped(v - middle, limit) for v in values))
        self.starts.append(self.begun)
        if len(self.means) > LONGEST:
            del self.means[0], self.starts[0]
        return self._judge(step) if self.baseline.ready else None

    def restart(self) -> None:
        """Forget the past: a shift divides it from what comes."""
        self.block, self.seen = [], 0
        self.means, self.starts = [], []

    def _judge(self, step: int) -> Alarm | None:
        lines = [self._slope(span) for span in SPANS if span <= len(self.means)]
        if all(fit.score < self.settings.release * self.settings.threshold for fit in lines):
            self.armed = True
        score, _, span, first, last = max((fit for fit in lines if fit.fits), default=_NONE)
        if not self.armed or score <= self.settings.threshold or self._cooling(step, self.settings.cooldown):
            return None
        self.armed = False
        return Alarm(step, "trend", last, first, score, self.settings.threshold, self.starts[-span])

    def _slope(self, span: int) -> _Line:
        """The line through the last ``span`` means."""
        ys = self.means[-span:]
        xs = range(span)
        slope, intercept, error = line(xs, ys)
        first, last = intercept, intercept + slope * (span - 1)
        fits = abs(last - first) > self.floor and error < fit_step(ys, skip=1).error
        allowed = self.baseline.long_run_variance / self.settings.block
        own = max(error / (span - 2), MIN_VARIANCE * allowed)
        size = abs(slope) * math.sqrt(span * (span * span - 1) / 12)
        by_own = size / math.sqrt(own) * self.settings.threshold / SPANS[span]
        return _Line(max(by_own, size / math.sqrt(max(own, allowed))), fits, span, first, last)
