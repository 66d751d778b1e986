"""DS308: the model answers something else than one number a sequence."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts
from driftscope.rules._reward import load_line
from driftscope.rules.base import Finding, Rule, Thresholds

TITLE = "The model does not answer one reward a sequence"


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires by the shape of the logits of one sequence."""
    reward = facts.reward
    if reward is None or reward.reward_shape is None or reward.reward_shape == (1,):
        return None
    shape = reward.reward_shape
    if len(shape) == 1:
        evidence = (
            f"{shape[0]} logits a sequence (num_labels={reward.num_labels}); the pairwise loss takes each column "
            "for a reward of its own and averages them"
        )
        remedy = f"{load_line()}, or RewardConfig(model_init_kwargs={{'num_labels': 1}}) where the trainer loads it"
        return Finding("warning", f"The model answers {shape[0]} rewards a sequence", evidence, remedy)
    evidence = (
        f"{printable(reward.model_class)} answers logits of shape {shape} for one sequence, where a reward is (1,); "
        "the pairwise loss compares them element by element"
    )
    return Finding("critical", TITLE, evidence, load_line())


RULE = Rule(
    code="DS308",
    name="reward-num-labels",
    title=TITLE,
    group="gradient flow and PEFT",
    why=(
        "A reward is one number a sequence, num_labels=1; transformers' default is 2. TRL 0.27.2 trains on whatever "
        "comes: it also loads a model that is given by its path with the default, each column then learns a reward of "
        "its own, and a checkpoint with two rows in its head does not load where one is expected. TRL 1.16 refuses a "
        "model object whose configuration says other than 1, but judges by the configuration alone: a causal language "
        "model with num_labels=1 passes, and its logits for every token are compared instead of rewards."
    ),
    condition="The logits of one sequence are not of shape (1,). Critical for logits per token, else a warning.",
    remedy="Load the model with AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).",
    source="doctor",
    predict=predict,
)
