"""DS403: low-precision weights round the optimizer's updates away."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.doctor.facts import Facts
from driftscope.rules._settings import weight_dtype
from driftscope.rules.base import Finding, Rule, Thresholds

SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
LOST_CRITICAL = 0.9
LOST_WARNING = 0.1


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where a step of size learning_rate leaves many trainable weights as they are."""
    if facts.settings is None:
        return None
    rate = float(facts.settings.get("learning_rate", 0.0))
    dtype = weight_dtype(facts)
    if rate <= 0.0:
        return None
    share = None
    if facts.model is not None and not facts.model.copy:
        share = facts.model.lost_update_share
    if share is not None:
        if share < LOST_WARNING:
            return None
        evidence = (
            f"learning_rate={rate:g}: {percent(share)} of the trainable weights ({dtype}) stay as they are when a "
            "step of that size is added, measured on this model"
        )
        return Finding("critical" if share >= LOST_CRITICAL else "warning", RULE.title, evidence, RULE.remedy)
    if dtype not in SPACING:
        return None
    # Adding lr is lost for sure where it is under half the spacing, which is SPACING times a power of two <= |w|.
    sure = 2 * rate / SPACING[dtype] * 2
    evidence = (
        f"learning_rate={rate:g} with trainable weights in {dtype}, not measured: a step of that size is lost on "
        f"every weight over {sig(sure)} in magnitude"
    )
    return Finding("warning", RULE.title, evidence, RULE.remedy)


RULE = Rule(
    code="DS403",
    name="lost-updates",
    title="The weights are too coarse for the optimizer's steps",
    group="numerics",
    why=(
        "bfloat16 keeps 8 bits of a number: next to a weight of 0.02 the next value is 0.0001 away. A step of AdamW "
        "has at most the size of the learning rate, in GRPO often 1e-6. It is added in the weight's dtype and rounds "
        "to nothing, in every step anew: the run goes on, with gradients and losses as they should be, and most "
        "weights never move."
    ),
    condition=(
        "Of the trainable weights w at least 10% (warning) or 90% (critical) are unchanged by w + learning_rate and w "
        "- learning_rate in their own dtype (mean of both), the size of the first step of Adam, AdamW and Lion. "
        "Without a measurement: trainable weights in bfloat16 or float16 (warning)."
    ),
    remedy=(
        "Keep the weights in float32 and compute in bfloat16: model_init_kwargs={'dtype': 'float32'} (--dtype "
        "float32) with bf16=True. Or train a LoRA adapter, whose weights PEFT keeps in float32."
    ),
    source="doctor",
    predict=predict,
)
