"""What the rules on the importance sampling ratio share."""

from __future__ import annotations

import math

from driftscope.records import IsRatio, Severity, StepRecord
from driftscope.rules.base import Thresholds, finite

EXACT_MASS = 1 - 1e-6


def applied_mean(ratio: IsRatio) -> float | None:
    """Mean of the ratio as the loss applies it, else of the raw one."""
    for stats in (ratio.applied, ratio.raw):
        if stats is not None and (mean := finite(stats.mean)) is not None:
            return mean
    return None


def support_explains(ratio: IsRatio) -> bool:
    """Whether the mass that truncated sampling keeps explains most of the mean log ratio."""
    kept = finite(ratio.kept_mass)
    if kept is None or not 0 < kept < EXACT_MASS:
        return False
    share = finite(ratio.truncated_support_share)
    if share is not None:
        return share >= 0.5
    token = finite(ratio.raw_token.mean) if ratio.raw_token is not None else None
    if token is None or token <= 0:
        return False
    return 0.5 <= math.log(token) / math.log(kept) <= 2.0


def support_severity(record: StepRecord, thresholds: Thresholds) -> Severity | None:
    """How bad the bias of truncated sampling is for this step, ``None`` where there is none."""
    ratio = record.is_ratio
    if ratio is None or not support_explains(ratio):
        return None
    if ratio.applied is None:  # no correction is applied: the ratio is seen, not used
        return "info"
    mean, kept = applied_mean(ratio), ratio.kept_mass
    if mean is not None and mean < thresholds.ratio_critical:
        return "critical"
    if (mean is not None and mean < thresholds.ratio_low) or (kept is not None and kept < thresholds.kept_mass):
        return "warning"
    return "info"
