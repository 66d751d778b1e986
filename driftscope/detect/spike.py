"""A spike: one value, or a few, far from what the past predicts."""

from __future__ import annotations

from dataclasses import dataclass

from driftscope.detect.alarm import Alarm, positive, whole
from driftscope.detect.base import Detector
from driftscope.detect.baseline import BaselineSettings

OUTLYING = 3.0  # a normal variable exceeds this in 0.27% of values
HEAVY_SHARE = 0.008  # share of values over OUTLYING from which the tails count as heavy, ...
HEAVY_SIZE = 3.5  # ... if one of them is over this ...
HEAVY_COUNT = 3  # ... or there are so many


@dataclass(frozen=True, kw_only=True)
class SpikeSettings:
    """When a value is a spike. Raises ``UsageError`` for a value outside its domain."""

    threshold: float = 5.4
    """Innovation standard deviations, for noise without heavy tails."""
    tail_factor: float = 4.0
    """With heavy tails, a spike is also this many times as large as any ordinary value remembered."""
    tail_memory: int = 1000
    """Values over which the share of outlying ones forgets and the largest is forgotten by half."""
    release: float = 0.5
    """Armed again once a value is below this share of the threshold."""
    stay: int = 6
    """Values in a row that stay out before the place where they are counts as the new level."""
    cooldown: int = 10
    """Least steps between two alarms."""

    def __post_init__(self) -> None:
        positive(self, threshold=1.0, tail_factor=1.0, release=0.0)
        whole(self, tail_memory=1, stay=2, cooldown=0)


class SpikeDetector(Detector[SpikeSettings]):
    """Judges each value by the smaller of its distance from the level and its innovation, both in innovation sds.

    So neither the return from a spike nor a slow wander counts as one.
    """

    SETTINGS = SpikeSettings
    STATE = ("armed", "tail", "share", "seen", "outside", "early")

    def __init__(
        self, settings: SpikeSettings | None = None, *, floor: float = 0.0, baseline: BaselineSettings | None = None
    ) -> None:
        super().__init__(settings, floor=floor, baseline=baseline)
        self.armed = True
        self.tail = 0.0  # largest ordinary score remembered
        self.share = 0.0  # share of ordinary scores over OUTLYING
        self.seen = 0
        self.outside: list[float] = []
        self.early: list[float] = []  # values of the warm-up: how heavy the tails are

    @property
    def threshold(self) -> float:
        """Innovation standard deviations that a spike exceeds now; larger while the scale is known badly."""
        threshold = self.settings.threshold * (1 + 5 / max(self.baseline.n_scale, 10.0))
        certain = self.tail > HEAVY_SIZE or self.share * self.seen > HEAVY_COUNT - 0.5
        if self.share <= HEAVY_SHARE or not certain:
            return threshold
        return max(threshold, self.settings.tail_factor * max(self.tail, HEAVY_SIZE))

    def _take(self, step: int, x: float | None) -> Alarm | None:
        alarm = None
        if x is not None and self.baseline.ready:
            alarm = self._judge(step, x)
        elif x is not None:
            self.early = [*self.early, x][-self.baseline.settings.warmup :]
        self.baseline.push(x)
        if self.early and self.baseline.ready:
            for v in self.early:
                self._ordinary(abs(v - self.baseline.level) / self.baseline.spread)
            self.early = []
        if len(self.outside) >= self.settings.stay:
            self.baseline.relevel(self.outside)
            self.outside, self.armed = [], True
        return alarm

    def _judge(self, step: int, x: float) -> Alarm | None:
        base, threshold = self.baseline, self.threshold
        distance = abs(x - base.level)
        size = min(distance, abs(base.innovation(x)) * base.scale)
        score = size / base.scale
        if not self.armed:
            if distance <= max(self.settings.release * threshold * base.scale, self.floor):
                self.armed, self.outside = True, []
            else:
                self.outside.append(x)
            return None
        if score <= threshold or size <= self.floor or self._cooling(step, self.settings.cooldown):
            self._ordinary(min(score, threshold))
            return None
        self.armed, self.outside = False, [x]
        return Alarm(step, "spike", x, base.level, score, threshold, step)

    def _ordinary(self, score: float) -> None:
        """Remember a score that was no alarm."""
        memory = self.settings.tail_memory
        self.seen = min(self.seen + 1, memory)
        self.share += ((score > OUTLYING) - self.share) / self.seen
        self.tail = max(self.tail * 0.5 ** (1 / memory), score)
