"""DS203: every importance sampling ratio is masked or capped."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.records import Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where (almost) every applied ratio is zero by a mask, or sits at the cap."""
    ratio = record.is_ratio
    stats = ratio.applied if ratio is not None else None
    if ratio is None or stats is None or stats.count == 0:
        return None
    masked, capped = finite(stats.share_masked) or 0.0, finite(stats.share_capped) or 0.0
    if max(masked, capped) < thresholds.all_masked:
        return None
    what = "masked: nothing is trained" if masked >= capped else "capped: the correction is a constant"
    severity: Severity = "warning" if stats.count > 1 else "info"
    raw = f", raw mean {sig(ratio.raw.mean)}" if ratio.raw is not None else ""
    evidence = (
        f"{percent(max(masked, capped))} of {stats.count} {stats.level} ratios, cap {sig(ratio.cap)}, "
        f"mode {ratio.mode or 'unknown'}{raw}"
    )
    return Finding(severity, f"Every importance sampling ratio is {what}", evidence, RULE.remedy)


RULE = Rule(
    code="DS203",
    name="all-masked-or-capped",
    title="Every importance sampling ratio is masked or capped",
    group="sampling",
    why=(
        "The *_mask modes set a ratio above the cap to zero, the *_truncate modes set it to the cap. If that happens "
        "to every ratio of a micro-batch, the first leaves no gradient at all and the second turns the correction "
        "into a constant factor: the step is lost or mis-scaled without any error."
    ),
    condition=(
        "share_masked or share_capped of the applied ratio >= 99.9%. Warning; info for a micro-batch with a single "
        "ratio, where chance suffices."
    ),
    remedy=(
        "Find out why the raw ratio is so large (see DS202); raising vllm_importance_sampling_cap only hides it. A "
        "token mode (vllm_importance_sampling_mode='token_truncate') keeps the product over a sequence from growing."
    ),
    check=check,
)
