"""A level shift: the values stay away from the level that was learned before.

A generalised likelihood ratio over every possible start of the change in the last ``window`` values. With the model of
baseline.py a shift by delta at tau makes the innovations e_tau ~ delta, e_i ~ (1 - phi) delta after it, so the best
linear estimate of delta from w of them is (e_tau + (1 - phi) sum e_i) / (1 + (w - 1)(1 - phi)^2). The uncertainty of
the learned level is part of the standard error. (M. Basseville and I. Nikiforov, Detection of Abrupt Changes, 1993.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from driftscope.detect.alarm import Alarm, Kind, positive, whole
from driftscope.detect.base import Detector
from driftscope.detect.baseline import BaselineSettings, clipped
from driftscope.detect.shape import fit_ramp, fit_step
from driftscope.errors import UsageError

RAMP_BETTER = 6.0  # squared residuals, in noise variances, that a ramp has to leave fewer than a step
AGREES = 0.4  # the median has moved at least this share of what the mean has ...
FAR = 15.0  # ... of values that count as at most this many standard deviations from the level
SLOW = 12  # values that a further shift takes to be seen, from which two make a trend; three always do


@dataclass(frozen=True, kw_only=True)
class ShiftSettings:
    """When a level counts as shifted. Raises ``UsageError`` for a value outside its domain."""

    threshold: float = 4.7
    """Standard errors of the estimated shift."""
    least: int = 3
    """Values that have to agree: fewer are a spike."""
    window: int = 64
    """Longest stretch of values looked at."""
    clip: float = 5.0
    """An innovation counts as at most this many standard deviations; fewer where the tails are heavy."""
    release: float = 0.5
    """Back home once the new level is nearer to the old one than this share of the shift."""
    home_memory: int = 200
    """Steps after which a shifted level is the home from which shifts are counted."""
    cooldown: int = 10
    """Least steps between two alarms."""

    def __post_init__(self) -> None:
        positive(self, threshold=1.0, clip=1.0, release=0.0)
        whole(self, least=2, window=4, home_memory=1, cooldown=0)
        if self.window < self.least:
            raise UsageError(f"ShiftSettings.window={self.window} is under least={self.least}: nothing could be seen.")


class ShiftDetector(Detector[ShiftSettings]):
    """A shift is told once; the new level is what later values are compared with, and a return home is no alarm.
    An alarm's baseline is the home level, from before the first of several shifts.

    Where the change is a ramp rather than a step the alarm's kind is ``trend``.
    """

    SETTINGS = ShiftSettings
    STATE = ("steps", "values", "surprises", "home", "home_step", "home_started", "stairs")

    def __init__(
        self, settings: ShiftSettings | None = None, *, floor: float = 0.0, baseline: BaselineSettings | None = None
    ) -> None:
        super().__init__(settings, floor=floor, baseline=baseline)
        self.steps: list[int] = []
        self.values: list[float] = []
        self.surprises: list[float] = []  # innovations in standard deviations, clipped
        self.home: float | None = None  # the level before the first shift
        self.home_step = 0  # step of the last alarm
        self.home_started = 0  # step at which the first shift began
        self.stairs = 0  # shifts in one direction since

    @property
    def threshold(self) -> float:
        """Standard errors that a shift exceeds now; larger while the scale is known badly."""
        return self.settings.threshold * (1 + 5 / max(self.baseline.n_scale, 10.0))

    def _take(self, step: int, x: float | None) -> Alarm | None:
        if x is None or not self.baseline.ready:
            self.baseline.push(x)
            return None
        self.steps.append(step)
        self.values.append(x)
        self.surprises.append(self._surprise(x))
        if len(self.surprises) > self.settings.window:
            del self.surprises[0]
        if len(self.steps) > 2 * self.settings.window:  # twice: to see the shape of the change
            del self.steps[0], self.values[0]
        self.baseline.push(x)
        if self.home is not None and step - self.home_step >= self.settings.home_memory:
            self.home = None
        if self._cooling(step, self.settings.cooldown):
            return None
        score, width = self._best()
        return self._tell(step, score, width) if abs(score) > self.threshold else None

    def _surprise(self, x: float) -> float:
        """The clipped innovation; an outlier and the return from it, which it makes a surprise too, leave none."""
        base, tails = self.baseline, self.baseline.wide_scale / self.baseline.scale
        limit, surprise = self.settings.clip / tails**2, base.innovation(x)
        last, distance = self.surprises[-1] if self.surprises else 0.0, x - base.level
        if abs(last) > 0.9 * limit and surprise * last < 0 and abs(distance) < abs(surprise) * base.scale:
            self.surprises[-1], surprise = 0.0, distance / base.spread
        return clipped(surprise, limit)

    def _best(self) -> tuple[float, int]:
        """The largest standardised shift over all starts, and the number of values since then."""
        rest, n_level = 1 - self.baseline.phi, max(self.baseline.n_level, 1.0)
        tails = self.baseline.wide_scale / self.baseline.scale
        after, moved, best, width = 0.0, 0.0, 0.0, 0
        for w, (surprise, value) in enumerate(zip(reversed(self.surprises), reversed(self.values), strict=False), 1):
            moved += value - self.baseline.level
            if w >= self.settings.least:
                information = 1 + (w - 1) * rest * rest
                total = surprise + rest * after
                score = total / tails / math.sqrt(information + (1 + (w - 1) * rest) ** 2 / n_level)
                if abs(score) > abs(best) and total * moved > 0 and abs(moved) > w * self.floor:
                    best, width = score, w
            after += surprise
        return best, width

    def _tell(self, step: int, score: float, width: int) -> Alarm | None:
        before, n_before, threshold = self.baseline.level, self.baseline.n_level, self.threshold
        width = self._agreeing(width, before)
        if width < self.settings.least:
            return None  # a spike so far
        recent, started = self.values[-width:], self.steps[-width]
        level = median(recent)
        limit = FAR * self.baseline.spread
        mean = fmean(clipped(v - before, limit) for v in recent)
        if (
            abs(level - before) <= self.floor
            or (level - before) * score <= 0
            or abs(level - before) < AGREES * abs(mean)
        ):
            return None  # a few outliers, not most of the values
        kind, started = self._shape(started)
        self.baseline.relevel(recent)
        self.steps, self.values, self.surprises = [], [], []
        if self.home is not None:
            if abs(level - self.home) <= max(self.settings.release * abs(before - self.home), self.floor):
                self.baseline.level, self.baseline.n_level = self.home, max(self.baseline.n_level, n_before)
                self.home = None
                return None
            onward = (level - before) * (before - self.home) > 0
            self.stairs = self.stairs + 1 if onward else 1
            if onward and (width >= SLOW or self.stairs > 2):
                kind, started = "trend", self.home_started  # it goes on in the same direction, bit by bit
        else:
            self.home, self.home_started, self.stairs = before, started, 1
        self.home_step = step
        return Alarm(step, kind, level, self.home, abs(score), threshold, started)

    def _agreeing(self, width: int, before: float) -> int:
        """A short stretch without its first values that lie nearer to the level before: they belong to it.

        0 where fewer than ``least`` of its values lie nearer to the level after.
        """
        if width > 2 * self.settings.least:
            return width
        after = median(self.values[-width:])
        moved = [abs(v - after) <= abs(v - before) for v in self.values[-width:]]
        return width - moved.index(True) if sum(moved) >= self.settings.least else 0

    def _shape(self, started: int) -> tuple[Kind, int]:
        """Whether the last values are a step or a ramp, and the step at which it began."""
        count = len(self.values)
        if count < 12 or len([s for s in self.steps if s >= started]) < 8:
            return "shift", started
        ramp, step = fit_ramp(self.values), fit_step(self.values)
        if step.error - ramp.error > RAMP_BETTER * ramp.error / (count - 3):
            return "trend", self.steps[ramp.start]
        return "shift", started
