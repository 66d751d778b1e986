"""Simulated series: noise with known autocorrelation and tails, and the faults that detectors are measured on."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from driftscope.errors import UsageError

Noise = Literal["white", "ar1_0.5", "ar1_0.8", "student_t3"]
NOISES: tuple[Noise, ...] = ("white", "ar1_0.5", "ar1_0.8", "student_t3")
SHIFTS = (1.1, 1.5, 3.0, 100.0)
_PHI: dict[str, float] = {"ar1_0.5": 0.5, "ar1_0.8": 0.8}


def noise(kind: Noise, runs: int, steps: int, *, sd: float, seed: int) -> NDArray[np.float64]:
    """Noise (runs, steps) with marginal standard deviation ``sd``, stationary from its first step.

    ``student_t3``: white, Student's t with 3 degrees of freedom, scaled to ``sd``. Raises ``UsageError`` for another
    kind.
    """
    if kind not in NOISES:
        raise UsageError(f"noise={kind!r} is not known; use one of {', '.join(NOISES)}.")
    rng = np.random.default_rng(seed)
    if kind == "student_t3":
        return rng.standard_t(3, (runs, steps)) * (sd / math.sqrt(3))
    phi = _PHI.get(kind, 0.0)
    out = rng.standard_normal((runs, steps)) * math.sqrt(1 - phi * phi)
    out[:, 0] /= math.sqrt(1 - phi * phi)
    for t in range(1, steps):
        out[:, t] += phi * out[:, t - 1]
    return out * sd


def shifted(series: NDArray[np.float64], factor: float, at: int) -> NDArray[np.float64]:
    """The series (runs, steps) of log ratios with the ratio multiplied by ``factor`` from index ``at`` on."""
    out = series.copy()
    out[:, at:] += math.log(factor)
    return out
