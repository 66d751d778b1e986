"""Series for the detectors' tests."""

from __future__ import annotations

import math
from collections.abc import Iterable

from driftscope.detect import Alarm
from driftscope.detect.simulate import Noise, noise


def one(kind: Noise = "white", *, steps: int = 600, sd: float = 0.3, seed: int = 0) -> list[float]:
    """One noise series."""
    return noise(kind, 1, steps, sd=sd, seed=seed)[0].tolist()


def plus(series: list[float], fault: Iterable[float]) -> list[float]:
    """The series with a fault added to it."""
    return [a + b for a, b in zip(series, fault, strict=True)]


def step(size: float, at: int, steps: int = 600) -> list[float]:
    """A level shift by ``size`` at index ``at``."""
    return [size if i >= at else 0.0 for i in range(steps)]


def pulse(size: float, at: int, width: int = 1, steps: int = 600) -> list[float]:
    """``width`` values that are ``size`` higher."""
    return [size if at <= i < at + width else 0.0 for i in range(steps)]


def ramp(size: float, at: int, length: int, steps: int = 600) -> list[float]:
    """A line that starts at ``at`` and reaches ``size`` after ``length`` steps."""
    return [size * min(max(i - at, 0) / length, 1.0) for i in range(steps)]


def alarms(detector, series: Iterable[float | None], first: int = 1) -> list[Alarm]:
    """Every alarm on a series; steps count from ``first``."""
    told = (detector.update(step, value) for step, value in enumerate(series, first))
    return [alarm for alarm in told if alarm is not None]


LOG3 = math.log(3)
LOG100 = math.log(100)
