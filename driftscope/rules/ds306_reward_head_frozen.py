"""DS306: the reward head is random and stays so."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts
from driftscope.rules._reward import config_line, gradient
from driftscope.rules.base import Finding, Rule, Thresholds

TITLE = "The reward head is random and frozen"


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where nothing can train a head that was never trained."""
    reward = facts.reward
    if reward is None or reward.head is None:
        return None
    if reward.head_trains is not False or not reward.head_random or reward.head_adapted:
        return None
    head = printable(reward.head)
    evidence = f"{head} is frozen and random: {printable(reward.head_random_evidence)}; {gradient(reward)}"
    remedy = config_line(reward) if reward.peft else f"model.{head}.requires_grad_(True)"
    return Finding("critical" if reward.adapters_reached == 0 else "warning", TITLE, evidence.rstrip("; "), remedy)


RULE = Rule(
    code="DS306",
    name="reward-head-frozen",
    title=TITLE,
    group="gradient flow and PEFT",
    why=(
        "A language model's checkpoint has no reward head; loading it for sequence classification makes a random one. "
        "While it is frozen, the reward is a random projection of the hidden states, fixed for good, and the rest of "
        "the model has to be bent to it. That can go well (docs/reward-models.md has a run), but the final norm "
        "bounds the hidden states, so a head that cannot grow bounds the reward; and the reward cannot be had "
        "again without that very projection."
    ),
    condition=(
        "The head's weight requires no gradient, no adapter works on it, and it is random: its weights are missing "
        "from the checkpoint that the model was loaded from or, where that is unknown, their mean and standard "
        "deviation are those of the initialisation within four standard errors. Critical where no gradient reaches an "
        "adapter either, else a warning."
    ),
    remedy=(
        "peft_config = driftscope.reward_lora_config(model), which trains the head in full; without PEFT "
        "model.score.requires_grad_(True)."
    ),
    source="doctor",
    predict=predict,
)
