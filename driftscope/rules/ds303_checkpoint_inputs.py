"""DS303: reentrant gradient checkpointing of blocks whose inputs require no gradient."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.rules._flow import evidence, flows, remedy
from driftscope.rules.base import Finding, Rule, Thresholds


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where reentrant checkpointing is what cuts the graph."""
    flow = next((f for f in flows(facts) if f.cut_kind in ("reentrant", "reentrant-keyword") and f.missing), None)
    if flow is None:
        return None
    return Finding("critical", RULE.title, evidence(flow), remedy(flow, RULE.remedy))


RULE = Rule(
    code="DS303",
    name="checkpoint-inputs",
    title="Reentrant gradient checkpointing runs blocks whose inputs require no gradient",
    group="gradient flow and PEFT",
    why=(
        "Reentrant checkpointing runs a block under no_grad and recomputes it in the backward if a gradient comes for "
        "its output; the output requires one only if a positional input does. Behind frozen embeddings none does, so "
        "the adapters in the block get no gradient. TRL enables input gradients for PEFT models where its own "
        "gradient_checkpointing is set, not where the user has switched checkpointing on, or has wrapped blocks."
    ),
    condition=(
        "In a real forward, reentrant checkpointing ran a block with trainable parameters none of whose positional "
        "inputs requires a gradient, and the parameters got none (critical)."
    ),
    remedy=(
        "Call model.enable_input_require_grads() before training; or set gradient_checkpointing_kwargs="
        "{'use_reentrant': False}; or, at the price of the memory, gradient_checkpointing=False."
    ),
    source="doctor",
    predict=predict,
)
