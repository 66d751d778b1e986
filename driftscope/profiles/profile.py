"""A threshold profile: its limits, and what values they may take."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftscope.errors import UsageError
from driftscope.profiles.checks import CHECKS, Check

LEVELS = ("applied", "token", "geometric", "product")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Limits on a mismatch; ``None`` sets no limit. Raises ``UsageError`` for a value outside its domain."""

    name: str = "custom"
    ratio_mean_low: float | None = None
    """Mean raw importance sampling ratio, lower limit."""
    ratio_mean_high: float | None = None
    """The same, upper limit."""
    ratio_std_high: float | None = None
    """Standard deviation of the raw ratio."""
    ratio_max_high: float | None = None
    """Largest raw ratio: from here on the correction truncates or masks."""
    ess_low: float | None = None
    """Effective sample size of the raw ratio, as a share of the samples."""
    kl_high: float | None = None
    """|k1 estimate of KL(engine || trainer)|, nat a token."""
    k3_high: float | None = None
    """k3 estimate of KL(engine || trainer), nat a token."""
    chi2_token_high: float | None = None
    """chi-squared of the token ratio."""
    chi2_sequence_high: float | None = None
    """chi-squared of the sequence product."""
    mult_prob_error_high: float | None = None
    """Mean exp|d|."""
    share_outside_high: float | None = None
    """Share of tokens whose ratio is outside [0.9, 1.1]."""
    first_step_log_diff_high: float | None = None
    """|mean d| on the first step, before any update: nothing can be stale yet."""
    level: str = "applied"
    """Whose ratio: token, geometric (mean by sequence), product (by sequence), or the level that the loss applies."""
    noise_multiple: float = 3.0
    """A limit never stands nearer to the ideal than this multiple of the noise floor."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Limit -> where the number is from."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"name={self.name!r} of a threshold profile: it is a text.")
        if not isinstance(self.sources, Mapping):
            raise UsageError(
                f"sources={self.sources!r} of the profile {self.name!r}: it maps a limit to where its number is from."
            )
        if self.level not in LEVELS:
            raise UsageError(
                f"level={self.level!r} of the profile {self.name!r}: the ratio has the levels {', '.join(LEVELS)}."
            )
        for name, check in CHECKS.items():
            _require_number(self.name, name, getattr(self, name), check)
        if not (_is_number(self.noise_multiple) and self.noise_multiple >= 0):
            raise UsageError(
                f"noise_multiple={self.noise_multiple!r} of the profile {self.name!r}: it multiplies the noise floor, "
                "so it is a number from 0 up."
            )
        for name in self.sources:
            require_known(name, CHECKS, f"sources of the profile {self.name!r}")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: value for name in CHECKS if (value := getattr(self, name)) is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_number(profile: str, name: str, value: object, check: Check) -> None:
    if value is None:
        return
    good = _is_number(value) and isinstance(value, int | float)
    if good and isinstance(value, int | float):
        outer = value >= check.ideal if check.side == "high" else 0 <= value <= check.ideal
        if outer and (value > 0 or not check.log):
            return
    where = f"at least {check.ideal:g}" if check.side == "high" else f"between 0 and {check.ideal:g}"
    raise UsageError(
        f"{name}={value!r} of the profile {profile!r}: two identical policies give {check.ideal:g} there, so the "
        f"limit is a number {where}."
    )


def require_known(name: str, known: Mapping[str, Any], where: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"{where} has no field {name!r}.{hint} Known: {', '.join(known)}.")
