"""DS309: the reward depends on the padding, or a padded batch cannot be run."""

from __future__ import annotations

import math

from driftscope._text import percent, printable
from driftscope.doctor.facts import Facts
from driftscope.rules.base import Finding, Rule, Thresholds

TITLE = "The pad token is missing or wrong"
SHIFT = 0.05
"""Relative change of a reward by padding from which it counts; bfloat16 and other batch sizes stay under it."""


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires on a padded batch that raises, and on a reward that padding changes."""
    reward = facts.reward
    if reward is None:
        return None
    pad = f"model.config.pad_token_id={reward.pad_token_id}"
    remedy = "model.config.pad_token_id = tokenizer.pad_token_id"
    if reward.padding_error is not None:
        if "outside the embedding" in reward.padding_error:
            remedy = "model.resize_token_embeddings(len(tokenizer))"
        return Finding("critical", TITLE, f"{pad}; a padded batch: {printable(reward.padding_error)}", remedy)
    shift = reward.padding_shift
    if shift is None or shift <= SHIFT:
        return None
    change = percent(shift) if math.isfinite(shift) else "no finite amount"
    evidence = f"{pad}; padding at its end changes the reward of a sequence by {change}"
    return Finding("critical", TITLE, evidence, f"{remedy}, the one that the data collator pads with")


RULE = Rule(
    code="DS309",
    name="reward-padding",
    title=TITLE,
    group="gradient flow and PEFT",
    why=(
        "A sequence classification model reads the reward at the last token that is not model.config.pad_token_id. "
        "Without one, transformers refuses more than one sequence at a time; with another one than the collator pads "
        "with, the reward of every shorter sequence is read at a padding position; with an id that the embedding has "
        "no row for, the first padded batch raises. RewardTrainer sets model.config.pad_token_id from its tokenizer "
        "when it is built, so what is left are a data collator of one's own, a token added without resizing the "
        "embeddings, and every use of the model outside the trainer."
    ),
    condition=(
        "A padded batch raises, or the reward of the most padded sequence of a batch differs by more than 5% from "
        "that of the same sequence without padding."
    ),
    remedy=(
        "model.config.pad_token_id = tokenizer.pad_token_id; model.resize_token_embeddings(len(tokenizer)) after "
        "adding a token."
    ),
    source="doctor",
    predict=predict,
)
