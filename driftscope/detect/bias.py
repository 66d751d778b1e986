"""A bias of the mean: the series lies on one side of its target, however small each value's part of it is.

Its sum is held against a boundary that pure noise crosses with probability ``alpha`` at whatever step it is looked
at: the normal mixture of H. Robbins (Annals of Mathematical Statistics 41, 1970), with the noise's long-run variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from driftscope.detect.alarm import Alarm, positive, whole
from driftscope.detect.base import Detector
from driftscope.detect.baseline import BaselineSettings, clipped
from driftscope.errors import UsageError

CLIP = 6.0  # standard deviations from the level that a value counts at most


@dataclass(frozen=True, kw_only=True)
class BiasSettings:
    """When a mean is biased. Raises ``UsageError`` for a value outside its domain."""

    target: float = 0.0
    """What the mean should be; 0 for a log ratio."""
    alpha: float = 1e-4
    """Probability that noise alone ever crosses the boundary in one window."""
    tuned_for: int = 100
    """Number of values at which the boundary is tightest."""
    window: int = 512
    """Values in a block; the mean is taken over the current and the last block."""
    release: float = 0.5
    """Armed again once the score is below this share of the boundary."""
    cooldown: int = 64
    """Least steps between two alarms."""

    def __post_init__(self) -> None:
        positive(self, target=-math.inf, alpha=0.0, release=0.0)
        whole(self, tuned_for=1, window=20, cooldown=0)
        if not 0 < self.alpha < 1:
            raise UsageError(f"BiasSettings.alpha={self.alpha!r} is a probability; use one in (0, 1), say 1e-4.")


class BiasDetector(Detector[BiasSettings]):
    """Tests |mean - target| > floor over the last one to two windows."""

    SETTINGS = BiasSettings
    STATE = ("armed", "early", "total", "count", "total_before", "count_before", "begun", "begun_before")

    def __init__(
        self, settings: BiasSettings | None = None, *, floor: float = 0.0, baseline: BaselineSettings | None = None
    ) -> None:
        super().__init__(settings, floor=floor, baseline=baseline)
        self.armed = True
        self.early: list[float] = []  # values of the warm-up
        self.total = self.total_before = 0.0
        self.count = self.count_before = 0
        self.begun = self.begun_before = 0

    def _take(self, step: int, x: float | None) -> Alarm | None:
        self.baseline.push(x)
        if x is None:
            return None
        if self.count == 0 and not self.early:
            self.begun = step
        if not self.baseline.ready:
            self.early = [*self.early, x][-self.baseline.settings.warmup :]
            return None
        for value in (*self.early, x):
            self.total += clipped(value - self.baseline.level, CLIP * self.baseline.spread)
            self.total += self.baseline.level - self.settings.target
            self.count += 1
        self.early = []
        alarm = self._judge(step)
        if self.count >= self.settings.window:
            self.total_before, self.count_before, self.begun_before = self.total, self.count, self.begun
            self.total, self.count = 0.0, 0
        return alarm

    def _judge(self, step: int) -> Alarm | None:
        total, count = self.total + self.total_before, self.count + self.count_before
        variance = self.baseline.long_run_variance * (1 + 5 / max(self.baseline.n_scale, 10.0)) ** 2
        score = (abs(total) - count * self.floor) / math.sqrt(count * variance)
        ratio = count / self.settings.tuned_for
        boundary = math.sqrt((1 + 1 / ratio) * (math.log1p(ratio) - 2 * math.log(self.settings.alpha)))
        if score < self.settings.release * boundary:
            self.armed = True
        if not self.armed or score <= boundary or self._cooling(step, self.settings.cooldown):
            return None
        self.armed = False
        target = self.settings.target
        started = self.begun_before if self.count_before else self.begun
        return Alarm(step, "bias", target + total / count, target, score, boundary, started)
