"""DS305: what PEFT saves does not hold the reward head."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts
from driftscope.records import Severity
from driftscope.rules._reward import config_line, gradient
from driftscope.rules.base import Finding, Rule, Thresholds

TITLE = "The reward head is not among the modules that PEFT saves"


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where a module between backbone and logits is missing from the adapter's state."""
    reward = facts.reward
    if reward is None or not reward.peft or not reward.unsaved:
        return None
    names = ", ".join(printable(name) for name in reward.unsaved)
    parts = [f"PEFT saves no weight of {names}; modules_to_save={list(reward.modules_to_save)}"]
    severity: Severity = "warning"
    if reward.head in reward.unsaved:
        if reward.head_trains:
            parts.append("it is trained, and lost with the checkpoint")
        elif reward.head_adapted:
            parts.append("a LoRA adapter works on it, which is saved without the weight it was trained on")
        else:
            parts.append("it is frozen")
        if reward.head_random:
            parts.append(f"it is random: {printable(reward.head_random_evidence)}")
        parts.append(gradient(reward))
        if reward.head_random or reward.head_trains:
            severity = "critical"
    return Finding(severity, TITLE, "; ".join(p for p in parts if p), config_line(reward))


RULE = Rule(
    code="DS305",
    name="reward-head-not-saved",
    title=TITLE,
    group="gradient flow and PEFT",
    why=(
        "An adapter is loaded onto the checkpoint it was trained from. A language model's checkpoint has no reward "
        "head, so loading makes a new random one, and the adapter's rewards mean nothing under it, however well the "
        "training went. Only modules_to_save puts the head into the adapter. PEFT adds score and classifier by itself "
        "under task type SEQ_CLS, and no other name; a LoRA adapter on the head does not save the weight under it; a "
        "name in modules_to_save that no module has is passed over in silence."
    ),
    condition=(
        "Some weight of the head, or of another module between the backbone and the logits, is not in PEFT's state "
        "dict. Critical where the head is random or trained; else a warning."
    ),
    remedy="peft_config = driftscope.reward_lora_config(model), which finds the head and names it in modules_to_save.",
    source="doctor",
    predict=predict,
)
