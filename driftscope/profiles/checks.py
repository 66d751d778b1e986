"""What the limits of a profile look at, and how far honest noise alone moves each figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Side = Literal["low", "high"]


@dataclass(frozen=True)
class Check:
    """What a limit of a profile looks at. ``{level}`` stands for the profile's ratio level.

    ``gaussian``: how far the figure gets from its ideal under independent normal noise of standard deviation s per
    token, over n tokens, m weights and L tokens in each weight: its expectation and, where the figure is a mean that
    noise leaves at the ideal, its scatter. Ratios (``log``) in their logs. ``magnitude``: of the absolute value.
    """

    figure: str
    side: Side
    ideal: float
    gaussian: Callable[[float, float, float, float], float]
    log: bool = False
    magnitude: bool = False
    first_step: bool = False


def _mean_ratio(s: float, n: float, m: float, length: float) -> float:
    return s * s * length / 2 + s * math.sqrt(length / m)


def _max_ratio(s: float, n: float, m: float, length: float) -> float:
    return s * math.sqrt(length * 2 * math.log(max(m, 2.0)))


def _spread(s: float, n: float, m: float, length: float) -> float:
    variance = min(s * s * length, 300.0)
    return math.sqrt(math.expm1(variance) * math.exp(variance))


def _lost_samples(s: float, n: float, m: float, length: float) -> float:
    return -math.expm1(-s * s * length)


def _chi2_product(s: float, n: float, m: float, length: float) -> float:
    # mean w^2 - 1 of lognormal weights: its expectation, and the scatter of a mean of m of them.
    variance = min(s * s * length, 100.0)
    return math.expm1(2 * variance) + 2 * math.sqrt(variance / m)


def _outside(s: float, n: float, m: float, length: float) -> float:
    return math.erfc(0.1 / (s * math.sqrt(2))) if s else 0.0


def _mean_log(s: float, n: float, m: float, length: float) -> float:
    return s / math.sqrt(n)


def _k3(s: float, n: float, m: float, length: float) -> float:
    return math.expm1(min(s * s / 2, 300.0))


def _chi2_token(s: float, n: float, m: float, length: float) -> float:
    return _chi2_product(s, n, n, 1.0)


def _mult_prob_error(s: float, n: float, m: float, length: float) -> float:
    return math.log1p(math.erf(s / math.sqrt(2))) + s * s / 2


CHECKS: dict[str, Check] = {
    "ratio_mean_low": Check("raw.{level}.mean", "low", 1.0, _mean_ratio, log=True),
    "ratio_mean_high": Check("raw.{level}.mean", "high", 1.0, _mean_ratio, log=True),
    "ratio_std_high": Check("raw.{level}.std", "high", 0.0, _spread),
    "ratio_max_high": Check("raw.{level}.max", "high", 1.0, _max_ratio, log=True),
    "ess_low": Check("raw.{level}.ess", "low", 1.0, _lost_samples),
    "kl_high": Check("divergence.k1", "high", 0.0, _mean_log, magnitude=True),
    "k3_high": Check("divergence.k3", "high", 0.0, _k3),
    "chi2_token_high": Check("divergence.chi2_token", "high", 0.0, _chi2_token),
    "chi2_sequence_high": Check("divergence.chi2_sequence", "high", 0.0, _chi2_product),
    "mult_prob_error_high": Check(
        "log_difference.mult_prob_error",
        "high",
        1.0,
        _mult_prob_error,
        log=True,
    ),
    "share_outside_high": Check("share_outside", "high", 0.0, _outside),
    "first_step_log_diff_high": Check("log_difference.mean", "high", 0.0, _mean_log, magnitude=True, first_step=True),
}
"""Limit of a profile -> what it looks at."""
