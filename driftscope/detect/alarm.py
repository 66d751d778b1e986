"""What a detector says, and how settings and saved states are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from driftscope.errors import UsageError

Kind = Literal["spike", "shift", "trend", "bias"]
KINDS: tuple[Kind, ...] = ("spike", "shift", "trend", "bias")
LIMIT = 1e9  # infinite and absurd values count as this much; log quantities are far smaller

_T = TypeVar("_T")


@dataclass(frozen=True)
class Alarm:
    """One alarm of a detector. ``value`` and ``baseline`` are in the series' unit, ``score`` in standard errors."""

    step: int
    """Step at which it was found."""
    kind: Kind
    value: float
    """Level that the series has now: the value itself (spike), the mean since the change, the end of the line."""
    baseline: float
    """Level that it had before; the target of a bias."""
    score: float
    """Size of the deviation in its own standard errors, always positive."""
    threshold: float
    """What the score had to exceed at this step."""
    started: int
    """Estimated step at which it began."""
    series: str = ""
    episode: int = 0
    """Number of the episode in its series, from 1; 0 from a detector on its own."""
    upgrade: bool = False
    """The same episode, told again because it became another thing: a spike that stayed, a deviation that doubled."""

    @property
    def deviation(self) -> float:
        """``value - baseline``, in the series' unit."""
        return self.value - self.baseline


def usable(value: float | None) -> float | None:
    """``None`` for a missing value (``None``, NaN); infinite ones are cut to ``LIMIT``."""
    if value is None or math.isnan(value):
        return None
    return min(max(float(value), -LIMIT), LIMIT)


def positive(settings: object, /, **least: float) -> None:
    """Refuse fields of a settings dataclass that are no finite number or under their least value.

    Raises ``UsageError`` naming the field.
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
            raise UsageError(f"{type(settings).__name__}.{name}={value!r} is out of range; use a number >= {low:g}.")


def whole(settings: object, **least: int) -> None:
    """Refuse fields that are no whole number or under their least value. Raises ``UsageError`` naming the field."""
    for name, low in least.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UsageError(f"{type(settings).__name__}.{name}={value!r} counts steps; use a whole number >= {low}.")


def check_floor(floor: object) -> float:
    """The noise floor as a float. Raises ``UsageError`` where it is no finite number >= 0."""
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not math.isfinite(floor) or floor < 0:
        raise UsageError(
            f"floor={floor!r} is the deviation, in the series' unit, below which nothing alarms; use a number >= 0."
        )
    return float(floor)


def dump(owner: object, names: tuple[str, ...]) -> dict[str, Any]:
    """The named attributes as JSON holds them; lists are copied."""
    found = {name: getattr(owner, name) for name in names}
    return {name: [*value] if isinstance(value, list) else value for name, value in found.items()}


def load(owner: object, names: tuple[str, ...], state: Any) -> None:
    """Set the named attributes from a saved state. Raises ``UsageError`` where it is not one of this detector."""
    if not isinstance(state, dict) or any(name not in state for name in names):
        lacks = [name for name in names if not isinstance(state, dict) or name not in state]
        raise UsageError(
            f"The saved state is not one of {type(owner).__name__}: it lacks {', '.join(lacks)}. "
            "Pass what state() returned, or start a fresh detector."
        )
    for name in names:
        value, now = state[name], getattr(owner, name)
        number = isinstance(now, int | float) and not isinstance(value, int | float)
        if number or isinstance(now, list) != isinstance(value, list):
            raise UsageError(
                f"The saved state of {type(owner).__name__} holds {name}={value!r}; start a fresh detector."
            )
        setattr(owner, name, [*value] if isinstance(value, list) else value)


def settings_from(kind: type[_T], state: Any) -> _T:
    """Settings out of a saved state. Raises ``UsageError`` for unknown, missing or out-of-range fields."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(state, dict) or set(state) != known:
        raise UsageError(f"The saved state holds no {kind.__name__}; pass what state() returned.")
    return kind(**state)
