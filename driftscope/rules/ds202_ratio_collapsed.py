"""DS202: the importance sampling ratio is far from 1 and truncated sampling does not explain it."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.records import IsRatio, Severity, StepRecord
from driftscope.rules._ratios import support_explains
from driftscope.rules.base import Finding, Rule, Thresholds, finite


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on the mean (raw or applied) or on the effective sample size."""
    ratio = record.is_ratio
    if ratio is None or support_explains(ratio):
        return None
    means, ess = _means(ratio, thresholds), _ess(ratio)
    low = any(mean < thresholds.ratio_low for mean in means.values())
    high = any(mean > 1 / thresholds.ratio_low for mean in means.values())
    thin = ess is not None and ess < thresholds.ess
    if not (low or high or thin):
        return None
    severity: Severity = "warning"
    if any(mean < thresholds.ratio_critical for mean in means.values()):
        severity = "critical"
    if ratio.applied is None:
        severity = "info"
    parts = [f"mean {name} ratio {sig(mean)}" for name, mean in means.items()]
    if ess is not None:
        parts.append(f"effective sample size {percent(ess)}")
    if ratio.kept_mass is not None:
        parts.append(f"kept mass {sig(ratio.kept_mass, 4)}")
    return Finding(severity, RULE.title, "; ".join(parts), RULE.remedy)


def _means(ratio: IsRatio, thresholds: Thresholds) -> dict[str, float]:
    out = {}
    if ratio.raw is not None and (raw := finite(ratio.raw.mean)) is not None:
        out["raw"] = raw
    if ratio.applied is not None and (applied := finite(ratio.applied.mean)) is not None:
        masked = ratio.applied.share_masked or 0.0
        if masked < thresholds.all_masked:  # all masked is DS203
            out["applied"] = applied
    return out


def _ess(ratio: IsRatio) -> float | None:
    stats = ratio.raw if ratio.raw is not None else ratio.applied
    return finite(stats.ess) if stats is not None and stats.count > 1 else None


RULE = Rule(
    code="DS202",
    name="ratio-collapsed",
    title="The importance sampling ratio is far from 1, and truncated sampling does not explain it",
    group="sampling",
    why=(
        "Trainer and sampling engine should hold the same weights, so their log-probs should agree up to rounding and "
        "the ratio should be near 1. A mean far from it, or a small effective sample size, means that the engine "
        "sampled from another distribution: stale weights, another dtype or quantisation, another temperature, "
        "another chat template or tokenisation."
    ),
    condition=(
        "Mean raw or applied ratio outside [0.5, 2], or effective sample size under 0.3 (warning); mean under 0.1 "
        "(critical); only where the kept mass does not explain it (DS201). Info where no correction is applied."
    ),
    remedy=(
        "Check that the engine's weights are synchronised before each generation, that it runs in the trainer's dtype "
        "without quantisation, with the same temperature, and returns processed log-probs (logprobs_mode="
        "'processed_logprobs'). vllm_importance_sampling_mode='token_truncate' limits the damage meanwhile."
    ),
    check=check,
)
