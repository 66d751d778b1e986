"""Holding a mismatch against a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from driftscope._text import sig
from driftscope.errors import UsageError
from driftscope.mismatch.model import Mismatch
from driftscope.profiles.checks import CHECKS, Check, Side
from driftscope.profiles.profile import Profile


@dataclass(frozen=True)
class Violation:
    """One limit that a mismatch crosses."""

    limit: str
    """Name of the limit in the profile."""
    figure: str
    """Id of the figure: a key of ``driftscope.mismatch.FORMULAS``."""
    value: float
    allowed: float
    """The limit as applied: the profile's, or farther out where the noise floor asks for it."""
    nominal: float
    """The profile's limit."""
    side: Side
    source: str

    @property
    def text(self) -> str:
        """The measured figure and its limit in words."""
        over = "over" if self.side == "high" else "under"
        widened = f", widened from {sig(self.nominal)} by the noise floor" if self.allowed != self.nominal else ""
        return f"{self.figure} = {sig(self.value, 4)}, {over} {sig(self.allowed, 4)}{widened}"


def violations(
    mismatch: Mismatch,
    profile: Profile,
    noise_floor: Mismatch | float | None = None,
    *,
    first_step: bool = False,
) -> list[Violation]:
    """The limits that a mismatch crosses, in the profile's order.

    noise_floor: the mismatch of the same tokens scored twice on the same weights; or the standard deviation of one
    token's log-prob between two such scorings; ``None`` applies the limits as they stand. first_step: no update has
    happened yet, so limits for that step count. What the mismatch could not measure crosses nothing: see
    ``unchecked``.

    Raises ``UsageError`` for a negative noise floor.
    """
    if isinstance(noise_floor, int | float) and not 0 <= noise_floor < math.inf:
        raise UsageError(f"noise_floor={noise_floor!r}: it is a standard deviation in nat, a number from 0 up.")
    out = []
    for name, nominal, check in _checks(profile, first_step):
        figure = _figure(check, profile, mismatch)
        value = mismatch.get(figure)
        if value is None:
            continue
        value = abs(value) if check.magnitude else value
        allowed = _allowed(check, nominal, profile.noise_multiple * _noise(check, figure, mismatch, noise_floor))
        if value > allowed if check.side == "high" else value < allowed:
            source = profile.sources.get(name, "")
            out.append(Violation(name, figure, value, allowed, nominal, check.side, source))
    return out


def unchecked(mismatch: Mismatch, profile: Profile, *, first_step: bool = False) -> list[str]:
    """The profile's limits whose figure is unavailable."""
    return [
        name
        for name, _, check in _checks(profile, first_step)
        if mismatch.get(_figure(check, profile, mismatch)) is None
    ]


def _checks(profile: Profile, first_step: bool) -> list[tuple[str, float, Check]]:
    return [
        (name, value, CHECKS[name])
        for name, value in profile.limits.items()
        if first_step or not CHECKS[name].first_step
    ]


def _figure(check: Check, profile: Profile, mismatch: Mismatch) -> str:
    level = profile.level
    if level == "applied":
        level = "product" if mismatch.applied_level == "sequence" else "token"
    return check.figure.replace("{level}", level)


def _distance(check: Check, value: float) -> float:
    """How far a value is from the ideal; ratios in their logs, whichever way."""
    if not check.log:
        return abs(value - check.ideal)
    return abs(math.log(value / check.ideal)) if value > 0 else math.inf


def _allowed(check: Check, nominal: float, floor: float) -> float:
    """The limit, moved out to the floor's distance where that is farther."""
    if floor <= _distance(check, nominal):
        return nominal
    if check.log:
        return check.ideal * math.exp(min(floor, 700.0) if check.side == "high" else -floor)
    return check.ideal + (floor if check.side == "high" else -floor)


def _noise(check: Check, figure: str, mismatch: Mismatch, floor: Mismatch | float | None) -> float:
    """Distance of the noise floor from the figure's ideal: as measured, and as its spread makes probable here."""
    if floor is None:
        return 0.0
    measured = 0.0
    if isinstance(floor, Mismatch):
        value, d = floor.get(figure), floor.log_difference
        measured = 0.0 if value is None else _distance(check, value)
        spread = 0.0 if d.std is None or d.mean is None else math.hypot(d.std, d.mean)
    else:
        spread = float(floor)
    level = figure.split(".")[1] if figure.startswith("raw.") else "product"
    n, m = float(max(mismatch.tokens, 1)), float(max(mismatch.sequences, 1))
    length = n / m
    m, length = {"token": (n, 1.0), "geometric": (m, 1 / length), "product": (m, length)}[level]
    return max(measured, check.gaussian(spread, n, m, length))
