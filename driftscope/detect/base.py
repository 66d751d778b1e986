"""What the four detectors share: one value a step, missing values, a baseline, a state that can be saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar, Generic, Self, TypeVar

from driftscope.detect.alarm import Alarm, check_floor, dump, load, settings_from, usable
from driftscope.detect.baseline import Baseline, BaselineSettings

SettingsT = TypeVar("SettingsT")


class Detector(ABC, Generic[SettingsT]):
    """One kind of fault in one scalar series.

    ``floor``: deviations up to this, in the series' unit, never alarm. Bounded memory, no randomness.
    Raises ``UsageError`` for a floor or settings out of range.
    """

    SETTINGS: ClassVar[type[Any]]
    STATE: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, settings: SettingsT | None = None, *, floor: float = 0.0, baseline: BaselineSettings | None = None
    ) -> None:
        self.settings: SettingsT = settings if settings is not None else self.SETTINGS()
        self.floor = check_floor(floor)
        self.baseline = Baseline(baseline, floor=floor)
        self.last_step: int | None = None
        self.last_alarm: int | None = None

    def update(self, step: int, value: float | None) -> Alarm | None:
        """The next value; ``None`` or NaN where it is missing, infinity is a very large value.

        A step that is not after the last one is ignored: a run resumed from an older checkpoint repeats some.
        """
        if self.last_step is not None and step <= self.last_step:
            return None
        self.last_step = step
        alarm = self._take(step, usable(value))
        if alarm is not None:
            self.last_alarm = step
        return alarm

    @abstractmethod
    def _take(self, step: int, x: float | None) -> Alarm | None:
        """Judge one value that is new; ``None`` where it is missing."""

    def _cooling(self, step: int, cooldown: int) -> bool:
        return self.last_alarm is not None and step - self.last_alarm < cooldown

    def state(self) -> dict[str, Any]:
        """Everything that ``from_state`` needs, as JSON holds it."""
        return {
            "settings": asdict(self.settings),  # type: ignore[call-overload]
            "floor": self.floor,
            "baseline": self.baseline.state(),
            **dump(self, ("last_step", "last_alarm", *self.STATE)),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """A detector that goes on where ``state()`` was taken. Raises ``UsageError`` for a foreign state."""
        made = cls()
        load(made, ("last_step", "last_alarm", *cls.STATE), state)
        made.settings = settings_from(cls.SETTINGS, state.get("settings"))
        made.floor = check_floor(state.get("floor", 0.0))
        made.baseline = Baseline.from_state(state.get("baseline"))
        return made
