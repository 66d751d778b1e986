"""What a series does when nothing is wrong: level, innovation scale and autocorrelation, learned robustly.

The model is x_t = level + d_t with d_t = phi d_{t-1} + e_t. It starts from the median and the median absolute
deviation of the warm-up and is then updated by every value, winsorised (Huber's proposal 2: P. Huber, Robust
Statistics, 1981, ch. 6), so that an outlier moves it by a bounded step. Values are learned ``guard`` steps late: what
a detector is about to call a change has not yet become part of the level that it is compared with.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from driftscope.detect.alarm import check_floor, dump, load, positive, settings_from, usable, whole
from driftscope.errors import UsageError

WIDE = 5.0  # standard deviations up to which the tails of the noise are measured
MAD_TO_SD = 1.4826  # a normal variable's standard deviation over its median absolute deviation


@dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """How a baseline learns. Raises ``UsageError`` for a value outside its domain."""

    warmup: int = 50
    """Values seen before anything is judged against the level."""
    guard: int = 32
    """Steps that a value waits before it is learned."""
    memory: int = 1000
    """Values over which level, scale and autocorrelation forget."""
    clip: float = 2.5
    """Deviations count as at most this many standard deviations while they are learned."""
    max_phi: float = 0.95
    """Largest autocorrelation believed."""

    def __post_init__(self) -> None:
        whole(self, warmup=10, guard=0, memory=20)
        positive(self, clip=1.0, max_phi=0.0)
        if self.max_phi >= 1:
            raise UsageError(f"BaselineSettings.max_phi={self.max_phi!r}: an autocorrelation is below 1.")


def kept_variance(clip: float) -> float:
    """E[min(z^2, clip^2)] of a standard normal z: what winsorising leaves of the variance."""
    tail = 0.5 * math.erfc(clip / math.sqrt(2))
    density = math.exp(-0.5 * clip * clip) / math.sqrt(2 * math.pi)
    return 1 - 2 * tail - 2 * clip * density + 2 * clip * clip * tail


def clipped(value: float, limit: float) -> float:
    """The value, cut to [-limit, limit]."""
    return min(max(value, -limit), limit)


class Baseline:
    """Level, scale and autocorrelation of one series; bounded memory, constant time per value.

    ``floor``: noise floor in the series' unit; the scale never falls below a tenth of it.
    """

    _STATE = (
        "warm", "pending", "last", "gap", "learned", "level", "n_level",
        "variance", "wide", "c0", "c1", "n_scale", "phi", "scale", "ready",
    )  # fmt: skip

    def __init__(self, settings: BaselineSettings | None = None, *, floor: float = 0.0) -> None:
        self.settings = settings or BaselineSettings()
        self.floor = check_floor(floor)
        self.ready = False
        self.warm: list[float | None] = []
        self.pending: list[float | None] = []
        self.last: float | None = None
        self.gap = 0
        self.learned: float | None = None
        self.level = 0.0
        self.n_level = 0.0
        self.variance = self.c0 = self.c1 = 0.0
        self.wide = 0.0  # variance of the innovations cut at WIDE instead of clip standard deviations
        self.n_scale = 0.0
        self.phi = 0.0
        self.scale = 1.0  # standard deviation of the innovations
        self._kept = kept_variance(self.settings.clip)

    @property
    def spread(self) -> float:
        """Standard deviation of the values around the level."""
        return self.scale / math.sqrt(1 - self.phi * self.phi)

    @property
    def wide_scale(self) -> float:
        """Standard deviation of the innovations, tails included: over ``scale`` where they are heavy, never under."""
        return max(self.scale, math.sqrt(self.wide))

    @property
    def long_run_variance(self) -> float:
        """n times the variance of a mean of n values, for large n: wide_scale^2 / (1 - phi)^2."""
        return (self.wide_scale / (1 - self.phi)) ** 2

    def innovation(self, value: float) -> float:
        """What the past does not predict of the value, in standard deviations."""
        if self.last is None:
            return (value - self.level) / self.spread
        phi = self.phi ** (self.gap + 1)
        surprise = value - self.level - phi * (self.last - self.level)
        return surprise / (self.scale * math.sqrt((1 - phi * phi) / (1 - self.phi * self.phi)))

    def push(self, value: float | None) -> None:
        """Take the next value, ``None`` where it is missing; it is learned ``guard`` values later."""
        value = usable(value)
        self._learn_late(value)
        if value is None:
            self.gap += 1
        else:
            self.last, self.gap = value, 0

    def relevel(self, values: list[float]) -> None:
        """A new level, from the values at it; scale and autocorrelation stay and may change faster for a while."""
        middle = median(values)
        self.level = middle + fmean(clipped(v - middle, self.settings.clip * self.spread) for v in values)
        self.n_level = float(len(values))
        self.n_scale = min(self.n_scale, 2.0 * self.settings.warmup)
        self.pending, self.learned = [], None

    def state(self) -> dict[str, Any]:
        """Everything that ``from_state`` needs, as JSON holds it."""
        return {"settings": asdict(self.settings), "floor": self.floor, **dump(self, self._STATE)}

    @classmethod
    def from_state(cls, state: Any) -> Baseline:
        """A baseline that goes on where ``state()`` was taken. Raises ``UsageError`` for a foreign state."""
        made = cls()
        load(made, cls._STATE, state)
        made.settings = settings_from(BaselineSettings, state.get("settings"))
        made.floor = check_floor(state.get("floor", 0.0))
        made._kept = kept_variance(made.settings.clip)
        return made

    def _learn_late(self, value: float | None) -> None:
        if not self.ready:
            self.warm.append(value)
            if value is not None and sum(v is not None for v in self.warm) >= self.settings.warmup:
                self._start()
            elif len(self.warm) > 4 * self.settings.warmup:
                del self.warm[0]
            return
        self.pending.append(value)
        while len(self.pending) > min(self.settings.guard, self.n_level):
            self._learn(self.pending.pop(0))

    def _start(self) -> None:
        """Level, scale and autocorrelation of the warm-up."""
        values = [v for v in self.warm if v is not None]
        self.level = median(values)
        spread = MAD_TO_SD * median(abs(v - self.level) for v in values)
        if spread == 0:  # more than half the values are equal
            spread = math.sqrt(math.pi / 2) * fmean(abs(v - self.level) for v in values)
        spread = max(spread, self._least())
        limit = self.settings.clip * spread
        self.level += fmean(clipped(v - self.level, limit) for v in values)
        d = [None if v is None else clipped(v - self.level, limit) for v in self.warm]
        pairs = [(a, b) for a, b in pairwise(d) if a is not None and b is not None]
        self.n_level = float(len(values))
        self.n_scale = float(max(len(pairs), 2))
        self.c0 = fmean(v * v for v in d if v is not None)
        self.c1 = fmean(a * b for a, b in pairs) if pairs else 0.0
        self._set_phi()
        self.variance = (spread * spread) * (1 - self.phi * self.phi)
        errors = [b - self.phi * a for a, b in pairs] or [0.0]
        for _ in range(10):
            limit = self.settings.clip * math.sqrt(self.variance)
            self.variance = max(fmean(clipped(e, limit) ** 2 for e in errors) / self._kept, self._least() ** 2)
        self._set_scale()
        surprises = [
            (b - self.level) - self.phi * (a - self.level)
            for a, b in pairwise(self.warm)
            if a is not None and b is not None
        ]
        self.wide = fmean(clipped(e, WIDE * self.scale) ** 2 for e in surprises or [0.0])
        self.learned, self.ready, self.warm = self.warm[-1], True, []

    def _learn(self, value: float | None) -> None:
        if value is None:
            self.learned = None
            return
        clip, memory, spread = self.settings.clip, float(self.settings.memory), self.spread
        d = clipped(value - self.level, clip * spread)
        self.n_level = min(self.n_level + 1, memory)
        if self.learned is not None:
            before = clipped(self.learned - self.level, clip * spread)
            self.n_scale = min(self.n_scale + 1, memory)
            self.c0 += (d * d - self.c0) / self.n_scale
            self.c1 += (d * before - self.c1) / self.n_scale
            error = clipped(d - self.phi * before, clip * self.scale)
            wide = (value - self.level) - self.phi * (self.learned - self.level)
            self.wide += (clipped(wide, WIDE * self.scale) ** 2 - self.wide) / self.n_scale
            self.variance += (error * error / self._kept - self.variance) / self.n_scale
            self._set_phi()
            self._set_scale()
        self.level += d / self.n_level
        self.learned = value

    def _set_phi(self) -> None:
        """Lag-1 autocorrelation, its small-sample bias taken out and one standard error added: cautious.

        Bias -(1 + 3 phi) / n: M. Kendall, Biometrika 41 (1954).
        """
        raw = clipped(self.c1 / self.c0, 1.0) if self.c0 > 0 else 0.0
        cautious = raw + (1 + 3 * raw) / self.n_scale + math.sqrt((1 - raw * raw) / self.n_scale)
        self.phi = min(max(cautious, 0.0), self.settings.max_phi)

    def _set_scale(self) -> None:
        self.scale = max(math.sqrt(self.variance), self._least())

    def _least(self) -> float:
        return max(0.1 * self.floor, 1e-9 * max(1.0, abs(self.level)))
