"""Facts of a reward model as the doctor measures them on an honest run; tests change what they are about."""

from __future__ import annotations

from typing import Any

from driftscope.doctor.facts import Facts, RewardFacts
from driftscope.doctor.foresee import foresee
from driftscope.rules import Finding

HONEST: dict[str, Any] = {
    "head": "score",
    "head_modules": ("score",),
    "num_labels": 1,
    "pad_token_id": 509,
    "padding_shift": 6.5e-08,
    "peft": True,
    "task_type": "SEQ_CLS",
    "modules_to_save": ("score", "classifier"),
    "adapters": 4,
    "adapters_reached": 4,
    "head_trains": True,
    "head_saved": True,
    "head_adapted": False,
    "head_random": True,
    "head_random_evidence": "the checkpoint (model.safetensors) has no score.weight",
    "head_grad_norm": 1.97,
    "loss_change": 2.8e-05,
    "model_class": "Qwen2ForSequenceClassification",
    "reward_shape": (1,),
    "pairs": 4,
    "loss": 0.687,
    "trainer": True,
}
FROZEN = {"head_trains": False, "head_saved": False, "unsaved": ("score",), "head_grad_norm": 0.0}
"""What a task type of None does to the head."""


def facts(**changes: Any) -> Facts:
    """An honest run's facts, with changes."""
    return Facts(reward=RewardFacts(**{**HONEST, **changes}))


def found(rule: str, given: Facts) -> Finding | None:
    """The finding of one rule, or ``None``; a rule that fails is an error."""
    diagnosis = foresee(given)
    assert not diagnosis.failed
    return next((finding for finding in diagnosis if finding.rule == rule), None)
