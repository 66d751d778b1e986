"""DS108: the adapter on lm_head is dropped."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._head import head_words
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``head_adapter``."""
    return cause_finding(
        record,
        thresholds,
        "head_adapter",
        does="ignores the adapter on lm_head",
        would="ignore the adapter on lm_head",
        remedy=RULE.remedy,
        extra=head_words(record),
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("head_adapter",),
        does="ignores the adapter on lm_head",
        remedy=RULE.remedy,
    )


RULE = Rule(
    code="DS108",
    name="head-adapter-dropped",
    title="The adapter on lm_head is dropped",
    group="loss paths",
    why=(
        "A LoRA adapter on lm_head adds B A h to the logits. A fused path that reads lm_head.weight takes the "
        "base weight without it: the adapter gets no gradient, and all log-probs are those of the model "
        "without it."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`head_adapter` in `causes`). Critical if its "
        "factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy="Remove 'lm_head' from target_modules of the LoraConfig, or set use_liger_kernel=False.",
    check=check,
    predict=predict,
    foreseen=FORESEEN + ", on a tiny random model with such an adapter.",
)
