"""All detectors on one named series: one alarm an episode."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from driftscope.detect.alarm import Alarm, check_floor, dump, load, positive, usable, whole
from driftscope.detect.base import Detector
from driftscope.detect.baseline import BaselineSettings
from driftscope.detect.bias import BiasDetector, BiasSettings
from driftscope.detect.shift import ShiftDetector, ShiftSettings
from driftscope.detect.spike import SpikeDetector, SpikeSettings
from driftscope.detect.trend import TrendDetector, TrendSettings
from driftscope.errors import UsageError

EXPLAINS = (
    1024  # steps for which a shift explains a trend or bias that the slow detectors see: as far as they look back
)


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Which detectors run, with which settings (``None``: off), and what counts as one episode.

    Raises ``UsageError`` for a value outside its domain.
    """

    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    spike: SpikeSettings | None = field(default_factory=SpikeSettings)
    shift: ShiftSettings | None = field(default_factory=ShiftSettings)
    trend: TrendSettings | None = field(default_factory=TrendSettings)
    bias: BiasSettings | None = field(default_factory=BiasSettings)
    """Off where the series has no target of its own (0 for a log ratio)."""
    cooldown: int = 100
    """Steps without any detector's alarm after which an episode is over."""
    escalate: float = 2.0
    """An open episode is told again when its deviation is this many times as large as the one told."""

    def __post_init__(self) -> None:
        whole(self, cooldown=0)
        positive(self, escalate=1.0)


class Monitor:
    """Feeds one series to its detectors and merges what they say.

    ``floor``: noise floor in the series' unit, as measured in the run times whatever multiple is wanted: a deviation
    up to it never alarms. An episode gives one alarm; another with ``upgrade=True`` only where a spike turns out to
    stay, a shift to go on as a trend, or the deviation grows ``escalate`` times or turns to the other side. A return
    to where it was is no alarm.
    """

    _STATE = ("last_step", "episodes", "open", "kind", "size", "last_seen", "shifted", "shifted_step")

    def __init__(self, series: str, *, floor: float = 0.0, settings: MonitorSettings | None = None) -> None:
        self.series = series
        self.settings = settings or MonitorSettings()
        self.floor = check_floor(floor)
        base, s = self.settings.baseline, self.settings
        self.spike = SpikeDetector(s.spike, floor=floor, baseline=base) if s.spike else None
        self.shift = ShiftDetector(s.shift, floor=floor, baseline=base) if s.shift else None
        self.trend = TrendDetector(s.trend, floor=floor, baseline=base) if s.trend else None
        self.bias = BiasDetector(s.bias, floor=floor, baseline=base) if s.bias else None
        self.last_step: int | None = None
        self.episodes = 0
        self.open = False
        self.kind: str | None = None  # of the last episode
        self.size = 0.0  # largest deviation told in it
        self.last_seen = 0  # step of the last alarm of any detector
        self.shifted = 0.0  # deviation of the last shift or trend told
        self.shifted_step = 0

    @property
    def detectors(self) -> dict[str, Detector[Any]]:
        """The detectors that run, by name."""
        every = {"shift": self.shift, "spike": self.spike, "trend": self.trend, "bias": self.bias}
        return {name: detector for name, detector in every.items() if detector is not None}

    def update(self, step: int, value: float | None) -> Alarm | None:
        """The next value; see ``Detector.update``."""
        if self.last_step is not None and step <= self.last_step:
            return None
        self.last_step = step
        x, home = usable(value), self.shift.home if self.shift is not None else None
        away = self.shift.baseline.level if self.shift is not None else 0.0
        alarms = [a for d in self.detectors.values() if (a := d.update(step, x)) is not None]
        if x is not None and home is not None:
            alarms = [a for a in alarms if a.kind != "spike" or abs(x - home) > 0.5 * abs(away - home)]
        self._close(step)
        return self._merge(step, alarms[0]) if alarms else None

    def _close(self, step: int) -> None:
        rising = self.kind == "trend" and self.trend is not None and not self.trend.armed
        if self.open and not rising and step - self.last_seen > self.settings.cooldown:
            self.open = False

    def _merge(self, step: int, alarm: Alarm) -> Alarm | None:
        size, told = alarm.deviation, self.size
        explained = self._explained(step, alarm)
        upgrade = False
        if self.open and alarm.kind != "bias":
            level = alarm.kind in ("shift", "trend")
            turned = level and self.kind in ("shift", "trend") and size * told < 0
            became = level and (self.kind == "spike" or (self.kind == "shift" and alarm.kind == "trend"))
            upgrade = became or turned or abs(size) >= self.settings.escalate * abs(told)
        self.last_seen = step
        if alarm.kind == "shift" and self.trend is not None:
            self.trend.restart()
        if explained or (self.open and not upgrade):
            return None
        if alarm.kind in ("shift", "trend"):
            self.shifted, self.shifted_step = size, step
        if not self.open:
            self.episodes += 1
        self.open, self.kind, self.size = True, alarm.kind, size
        return replace(alarm, series=self.series, episode=self.episodes, upgrade=upgrade)

    def _explained(self, step: int, alarm: Alarm) -> bool:
        """Whether a shift or trend that has been told already is what a slow detector sees now."""
        if alarm.kind not in ("trend", "bias") or self.shifted_step == 0 or (self.open and alarm.kind == "trend"):
            return False
        same_way = self.shifted * alarm.deviation > 0
        recent = step - self.shifted_step <= EXPLAINS
        return recent and same_way and abs(alarm.deviation) < self.settings.escalate * abs(self.shifted)

    def state(self) -> dict[str, Any]:
        """Everything that ``from_state`` needs, as JSON holds it."""
        detectors = {name: detector.state() for name, detector in self.detectors.items()}
        own = {"series": self.series, "floor": self.floor, "detectors": detectors}
        rest = {"cooldown": self.settings.cooldown, "escalate": self.settings.escalate}
        return {**own, "settings": rest, **dump(self, self._STATE)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Monitor:
        """A monitor that goes on where ``state()`` was taken. Raises ``UsageError`` for a foreign state."""
        made = cls("")
        load(made, ("series", "floor", *cls._STATE), state)
        saved, rest = state.get("detectors"), state.get("settings")
        if not isinstance(saved, dict) or not isinstance(rest, dict):
            raise UsageError("The saved state holds no detectors; pass what Monitor.state() returned.")
        made.spike = SpikeDetector.from_state(saved["spike"]) if "spike" in saved else None
        made.shift = ShiftDetector.from_state(saved["shift"]) if "shift" in saved else None
        made.trend = TrendDetector.from_state(saved["trend"]) if "trend" in saved else None
        made.bias = BiasDetector.from_state(saved["bias"]) if "bias" in saved else None
        base = next((d.baseline.settings for d in made.detectors.values()), BaselineSettings())
        made.settings = MonitorSettings(
            baseline=base,
            spike=made.spike.settings if made.spike is not None else None,
            shift=made.shift.settings if made.shift is not None else None,
            trend=made.trend.settings if made.trend is not None else None,
            bias=made.bias.settings if made.bias is not None else None,
            cooldown=rest.get("cooldown", 100),
            escalate=rest.get("escalate", 2.0),
        )
        return made
