"""DS107: what the model does to its logits is dropped."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._head import head_words
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``logit_transform``."""
    return cause_finding(
        record,
        thresholds,
        "logit_transform",
        does="skips what the model does to its logits",
        would="skip what the model does to its logits",
        remedy=RULE.remedy,
        extra=head_words(record),
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("logit_softcap", "logit_scale"),
        does="skips what the model does to its logits",
        remedy=RULE.remedy,
    )


RULE = Rule(
    code="DS107",
    name="logit-transform-dropped",
    title="The model's transform of its logits is dropped",
    group="loss paths",
    why=(
        "Some models change the logits after lm_head: a final softcap (Gemma 2), a scale (Cohere, Granite, "
        "Falcon-H1). A fused path that reads lm_head.weight directly computes log-probs of another model, so "
        "ratios, KL and gradients are those of a distribution that nobody samples from."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`logit_transform` in `causes`). Critical if "
        "its factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy=(
        "Set use_liger_kernel=False for this model. The fused LM head of TRL >= 1.14 applies softcap and "
        "scale and can be used instead."
    ),
    check=check,
    predict=predict,
    foreseen=FORESEEN + ", on a tiny random model with such a head.",
)
