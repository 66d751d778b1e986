"""DS404: mixed precision in float16 with weights that are float16 already."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.rules._settings import weight_dtype
from driftscope.rules.base import Finding, Rule, Thresholds


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires for fp16=True with trainable weights in float16."""
    settings = facts.settings
    if settings is None or not settings.get("fp16"):
        return None
    count = facts.model.dtypes.get("float16", 0) if facts.model is not None else 0
    if not count and weight_dtype(facts) != "float16":
        return None
    number = f"{count} trainable weights" if count else "the trainable weights"
    evidence = f"fp16=True, and {number} are float16: the gradient scaler refuses to unscale their gradients"
    return Finding("critical", RULE.title, evidence, RULE.remedy)


RULE = Rule(
    code="DS404",
    name="fp16-weights",
    title="fp16=True needs float32 weights, and these are float16",
    group="numerics",
    why=(
        "fp16=True is mixed precision: the loss is scaled up, and the gradients of the float32 weights are scaled "
        "down again before the step. torch's gradient scaler refuses gradients in float16, where scaling down would "
        "lose them: the first step ends with 'Attempting to unscale FP16 gradients.'"
    ),
    condition="fp16 is on and a trainable weight is float16, as measured on the model, or else as its dtype is set.",
    remedy=(
        "Set dtype='float32' in model_init_kwargs (--dtype float32) and keep fp16=True; on GPUs from Ampere on prefer "
        "bf16=True."
    ),
    source="doctor",
    predict=predict,
)
