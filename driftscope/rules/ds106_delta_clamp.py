"""DS106: the upper clamp of the policy ratio is dropped."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``delta_clamp``."""
    return cause_finding(
        record,
        thresholds,
        "delta_clamp",
        does="drops the upper clamp of the policy ratio (delta)",
        would="drop the upper clamp of the policy ratio (delta)",
        remedy=RULE.remedy,
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("delta",),
        does="drops the upper clamp of the policy ratio (delta)",
        remedy=RULE.remedy,
    )


RULE = Rule(
    code="DS106",
    name="delta-clamp-dropped",
    title="The upper clamp of the policy ratio (delta) is dropped",
    group="loss paths",
    why=(
        "Two-sided clipping caps the policy ratio at delta before it is multiplied by a negative advantage, "
        "so that one unlikely token cannot dominate the step. GRPOConfig of TRL 0.27.2 refuses delta together "
        "with use_liger_kernel, so the difference is silent only where delta was set after the configuration "
        "was checked."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`delta_clamp` in `causes`). Critical if its "
        "factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy=(
        "Set delta in GRPOConfig (which checks it) and use_liger_kernel=False, or upgrade to TRL >= 1.13, "
        "whose fused path applies it."
    ),
    check=check,
    predict=predict,
    foreseen=FORESEEN + ", some of whose ratios exceed delta.",
)
