"""DS201: truncated sampling biases the importance sampling ratio."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.records import StepRecord
from driftscope.rules._ratios import applied_mean, support_severity
from driftscope.rules.base import Finding, Rule, Thresholds

ONLY_SAMPLER = "Set top_p=1.0, top_k=0 and min_p=None, so that the engine returns log-probs over the whole vocabulary."


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the kept mass explains most of the ratio."""
    severity = support_severity(record, thresholds)
    ratio = record.is_ratio
    if severity is None or ratio is None:
        return None
    parts = [f"sampling keeps {percent(ratio.kept_mass)} of the probability mass per token"]
    if ratio.truncated_support_share is not None:
        share = min(max(ratio.truncated_support_share, 0.0), 1.0)
        parts.append(f"which explains {percent(share)} of the mean log ratio")
    mean = applied_mean(ratio)
    stats = ratio.applied if ratio.applied is not None else ratio.raw
    if mean is not None and stats is not None:
        per = f" per {stats.level}, mode {ratio.mode}" if ratio.mode else f" per {stats.level}"
        parts.append(f"{'applied' if ratio.applied is not None else 'raw'} ratio mean {sig(mean)}{per}")
    if ratio.applied is None:
        title = "Truncated sampling would bias the importance sampling ratio, which this run does not apply"
    else:
        title = "Truncated sampling biases the importance sampling ratio"
    token_mode = ratio.mode is not None and ratio.mode.startswith("token")
    return Finding(severity, title, ", ".join(parts), ONLY_SAMPLER if token_mode else RULE.remedy)


RULE = Rule(
    code="DS201",
    name="truncated-support",
    title="Truncated sampling biases the importance sampling ratio",
    group="sampling",
    why=(
        "With top_p, top_k or min_p the sampling engine renormalises its log-probs over the tokens it kept, while the "
        "trainer's are over the whole vocabulary. So each token's ratio carries the kept mass, and a sequence ratio "
        "carries it to the power of the length: 0.81 per token is 0.006 over 24 tokens. The correction then shrinks "
        "the loss for a reason that has nothing to do with the mismatch that it should correct."
    ),
    condition=(
        "kept_mass < 1 and it explains at least half of the mean log ratio. Critical if the mean applied ratio is "
        "under 0.1, warning if it is under 0.5 or kept_mass is under 0.99, info otherwise or where no correction is "
        "applied."
    ),
    remedy=(
        "Set top_p=1.0, top_k=0 and min_p=None, so that the engine returns log-probs over the whole vocabulary. If "
        "sampling must stay truncated, set vllm_importance_sampling_mode='token_truncate': the bias is then the kept "
        "mass of one token and no power of the length."
    ),
    check=check,
)
