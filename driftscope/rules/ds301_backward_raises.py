"""DS301: the backward raises."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.rules._flow import evidence, flows, remedy
from driftscope.rules.base import Finding, Rule, Thresholds

NOTHING = (
    "Train something: pass peft_config to the trainer, or load the adapter with is_trainable=True, or set "
    "requires_grad_(True) on what is to be trained."
)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where a real backward raised, or where it had nothing to arrive at."""
    flow = next((f for f in flows(facts) if f.error is not None or (f.message and not f.trainable)), None)
    if flow is None:
        return None
    if not flow.trainable:
        return Finding("critical", "The model has nothing to train", evidence(flow), NOTHING)
    return Finding("critical", RULE.title, evidence(flow), remedy(flow, RULE.remedy))


RULE = Rule(
    code="DS301",
    name="backward-raises",
    title="The backward pass raises: no gradient reaches the trainable parameters",
    group="gradient flow and PEFT",
    why=(
        'The loss is part of no graph that leads to a trainable parameter, so torch raises "element 0 of tensors does '
        'not require grad and does not have a grad_fn" at the first step. With LoRA the base model is frozen, so its '
        "embeddings' output requires no gradient; reentrant gradient checkpointing recomputes a block only if one of "
        "its inputs requires one. Every block then runs without a graph, although its adapters are trainable."
    ),
    condition=(
        "A real forward and backward on the model raised in the backward, or the model has no trainable parameter "
        "(critical)."
    ),
    remedy=(
        "Call model.enable_input_require_grads() before training; or set gradient_checkpointing_kwargs="
        "{'use_reentrant': False}; or, at the price of the memory, gradient_checkpointing=False."
    ),
    source="doctor",
    predict=predict,
)
