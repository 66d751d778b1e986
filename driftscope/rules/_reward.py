"""Words that the rules on reward models share."""

from __future__ import annotations

from driftscope._text import printable, sig
from driftscope.doctor.facts import Facts, RewardFacts, Settings

RIGHT_TASK = "SEQ_CLS"


def config_line(reward: RewardFacts) -> str:
    """The line that makes a right PEFT configuration for this model, and what it stands for."""
    heads = reward.head_modules or ((reward.head,) if reward.head else ())
    names = ", ".join(f'"{printable(name)}"' for name in heads)
    means = f'task_type="{RIGHT_TASK}", modules_to_save=[{names}]'
    return f"peft_config = driftscope.reward_lora_config(model)  # {means}"


def load_line() -> str:
    """The line that loads a causal language model's checkpoint as a reward model."""
    return "model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)"


def gradient(reward: RewardFacts) -> str:
    """What the backward brought to the head, and how much the loss depends on it."""
    parts = []
    if reward.head_grad_norm is not None:
        parts.append(
            f"gradient norm of {printable(reward.head or '')} after one backward: {sig(reward.head_grad_norm)}"
        )
    if reward.loss_change is not None:
        parts.append(f"moving its weight by 1% changes the pairwise loss by {sig(100 * reward.loss_change)}%")
    return "; ".join(parts)


def with_peft(facts: Facts) -> Settings | None:
    """The settings of a reward run with PEFT whose model could not be measured, else ``None``."""
    settings = facts.settings
    if facts.reward is not None or settings is None or settings.trainer != "reward" or not settings.get("use_peft"):
        return None
    return settings


def refusal(facts: Facts) -> str:
    """What the stack raised where the configured model was to be built; empty where nothing."""
    return printable(facts.unavailable.get("model", ""))
