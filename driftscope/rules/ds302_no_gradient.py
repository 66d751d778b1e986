"""DS302: training runs, but some trainable parameters get no gradient."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts, GradientFlow
from driftscope.rules._flow import best_fix, evidence, flows, remedy
from driftscope.rules.base import Finding, Rule, Thresholds

BY_CUT = {
    "not called": (
        "{at} is not part of the forward: leave it out of target_modules and modules_to_save (exclude_modules in "
        "LoraConfig), make its adapter active with set_adapter(), or freeze it with requires_grad_(False)."
    ),
    "detached": "Remove the detach() or .data from the forward of {at}, or put adapters only behind it.",
    "inside": "Remove the detach(), .data or no_grad from the forward of {at}, or put adapters only behind the cut.",
    "no_grad": "Take {at} out of torch.no_grad(), or put adapters only behind it.",
    "after": "Let the loss depend on the model's output: it is detached, or computed from something else.",
}
ZERO = (
    "What comes behind these parameters is zero: look for zero weights, a mask, a scale of 0 (lora_alpha) or a "
    "saturated function, and try a longer batch."
)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the backward works and leaves parameters out."""
    flow = next((f for f in flows(facts) if f.error is None and f.trainable and (f.missing or f.zero)), None)
    if flow is None:
        return None
    every = flow.adapters_missing == flow.adapters if flow.adapters else len(flow.missing) == flow.trainable
    lost = flow.missing or flow.zero
    named = ", ".join(map(printable, lost[:3])) + (", ..." if len(lost) > 3 else "")
    title = "All adapters train on nothing" if every and flow.adapters else RULE.title
    return Finding("critical" if every else "warning", title, f"{evidence(flow)}; {named}", _remedy(flow))


def _remedy(flow: GradientFlow) -> str:
    if not flow.missing:
        return remedy(flow, ZERO)
    by_cut = BY_CUT.get(flow.cut_kind or "")
    if best_fix(flow) is None and by_cut is not None and flow.cut_at is not None:
        return by_cut.format(at=printable(flow.cut_at))
    return remedy(flow, RULE.remedy)


RULE = Rule(
    code="DS302",
    name="no-gradient",
    title="Trainable parameters silently get no gradient",
    group="gradient flow and PEFT",
    why=(
        "The backward raises only if the loss has no graph at all. Where one trainable part does reach it - a head in "
        "modules_to_save, one adapter behind the cut - the training runs, the loss may even fall, and the other "
        "adapters never move: their lora_B stays zero. Nothing in the logs tells."
    ),
    condition=(
        "A real backward works, and a trainable parameter has no gradient, or an exact zero that the start of an "
        "adapter (lora_B = 0) does not explain. Critical if it is all adapters (without adapters, all parameters), "
        "warning otherwise."
    ),
    remedy=(
        "Look at the module where the graph is cut: remove the detach or no_grad there, call "
        "model.enable_input_require_grads() under reentrant gradient checkpointing, and leave modules that the "
        "forward does not call out of target_modules."
    ),
    source="doctor",
    predict=predict,
)
