"""DS101: the gradient norm of two loss paths differs."""

from __future__ import annotations

import math

from driftscope._text import path_words, sig, times
from driftscope.records import Severity, StepRecord
from driftscope.rules._causes import OWN_PATH_REMEDY, shadow_subject, subject
from driftscope.rules._ratios import support_severity
from driftscope.rules.base import Finding, Rule, Thresholds, crossed, finite, hidden_ratio, is_shadow, noise_floor


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on the larger of the hidden and the full-parameter ratio."""
    gap = record.gap
    if gap is None:
        return None
    ratios = [r for r in (hidden_ratio(record), finite(gap.param_grad_norm_ratio)) if r is not None and r >= 0]
    if not ratios:
        return None
    ratio = max(ratios, key=_size)
    noise = noise_floor(record, thresholds)
    if not crossed(ratio, thresholds.gap_warning, noise):
        return None
    reference = path_words(gap.reference)
    how = times(ratio) if 0 < ratio < math.inf else ("zero" if ratio == 0 else "not zero where it should be")
    if is_shadow(record):
        title = f"{shadow_subject(record)} make the gradient {how} than on {reference}"
        return Finding("info", _plain(title), _evidence(record), "Keep the live path until the causes are gone.")
    severity: Severity = "critical" if crossed(ratio, thresholds.gap_critical, noise) else "warning"
    title = f"{subject(record)} trains on a gradient {how} than on {reference}"
    return Finding(severity, _plain(title), _evidence(record), _remedy(record, thresholds))


def _size(ratio: float) -> float:
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def _plain(title: str) -> str:
    return title.replace("zero than on", "of zero, unlike").replace("be than on", "be, by")


def _remedy(record: StepRecord, thresholds: Thresholds) -> str:
    if record.gap is not None and record.gap.candidate == "reference":
        return OWN_PATH_REMEDY
    if support_severity(record, thresholds) in ("warning", "critical"):
        return (
            "Do not only switch paths: the reference is shrunk by a biased importance sampling ratio. "
            "First do what DS201 says, then what the causes (DS102 to DS109) say."
        )
    return RULE.remedy


def _evidence(record: StepRecord) -> str:
    gap = record.gap
    assert gap is not None
    norms = []
    for name in (gap.candidate, gap.reference):
        path = record.paths.get(name)
        norms.append(f"{name} {sig(path.hidden_grad_norm if path is not None else None)}")
    parts = [f"hidden gradient norm: {', '.join(norms)} (ratio {sig(gap.grad_norm_ratio)})"]
    if gap.param_grad_norm_ratio is not None:
        parts.append(f"full-parameter grad norm ratio {sig(gap.param_grad_norm_ratio)}")
    if gap.cosine is not None:
        parts.append(f"cosine {sig(gap.cosine)}")
    if gap.noise_floor is not None:
        parts.append(f"noise floor {sig(gap.noise_floor, 2)}")
    return "; ".join(parts)


RULE = Rule(
    code="DS101",
    name="grad-norm-gap",
    title="The gradient norm differs between the loss paths",
    group="loss paths",
    why=(
        "Two paths that compute the same loss have the same token coefficients c = dL/dlogp and so the same gradient. "
        "A ratio of their norms far from 1 means that the live path optimises another loss than the configured one. "
        "Gradient clipping hides the size of the step but not the wrong weighting of tokens and sequences, and it "
        "clips more or less often than you set it to."
    ),
    condition=(
        "r = |g_candidate| / |g_reference|, over the hidden states (or over all parameters where measured). "
        "Warning from gap_warning (1.5), critical from gap_critical (10), in either direction, and only if |log r| "
        "exceeds noise_multiple (3) times the measured noise floor. Info if the candidate is not what trains."
    ),
    remedy="See the causes (DS102 to DS109): the one with the largest share names the setting to change first.",
    check=check,
)
