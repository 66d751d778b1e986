"""DS307: the adapter works on nothing that the reward depends on."""

from __future__ import annotations

from driftscope._text import printable, sig
from driftscope.doctor.facts import Facts, RewardFacts
from driftscope.rules._reward import config_line, refusal, with_peft
from driftscope.rules.base import Finding, Rule, Thresholds

TITLE = "The adapter is on no module that the reward depends on"
NO_MODULE = ("NoMatchingPeftModuleError", "No modules were targeted", "not found in the base model")
"""How PEFT says that it found no module for the adapter: class and messages in 0.21."""


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires on PEFT's refusal, on no adapted module, and on adapters that no gradient reaches."""
    if facts.reward is not None:
        evidence = _measured(facts.reward) if facts.reward.peft else None
        return Finding("critical", TITLE, evidence, config_line(facts.reward)) if evidence else None
    settings, why = with_peft(facts), refusal(facts)
    if settings is None or not any(words in why for words in NO_MODULE):
        return None
    given = settings.get("lora_target_modules")
    evidence = f"lora_target_modules={given}; building the model raised {why}"
    return Finding("critical", TITLE, evidence, "lora_target_modules: all-linear  # or leave it out")


def _measured(reward: RewardFacts) -> str | None:
    if reward.peft_error is not None:
        refused = any(words in reward.peft_error for words in NO_MODULE)
        return f"PEFT refuses the adapter: {printable(reward.peft_error)}" if refused else None
    if reward.adapters == 0:
        return "0 modules carry an adapter"
    if reward.adapters is None or reward.adapters_reached != 0 or reward.loss_error is not None:
        return None
    if not reward.loss_change:  # the pairs do not differ, or it was not measured: nothing gets a gradient
        return None
    return (
        f"{reward.adapters} modules carry an adapter, and after one backward of the pairwise loss "
        f"({sig(reward.loss)}) no adapter weight has a gradient other than zero"
    )


RULE = Rule(
    code="DS307",
    name="reward-adapter-nowhere",
    title=TITLE,
    group="gradient flow and PEFT",
    why=(
        "Then only the head can learn, on the fixed features of the base model, or nothing at all. PEFT refuses "
        "target_modules that match no module, but not those that match only modules outside the path from the tokens "
        "to the reward, nor does anything refuse adapters that gradient checkpointing cuts off (DS303)."
    ),
    condition=(
        "PEFT refuses target_modules, no module carries an adapter, or one backward of the pairwise loss leaves the "
        "gradient of every adapter weight at zero although the loss depends on the head."
    ),
    remedy=(
        "peft_config = driftscope.reward_lora_config(model), which leaves target_modules to PEFT's own choice for the "
        "architecture or takes every linear layer but the head."
    ),
    source="doctor",
    predict=predict,
)
