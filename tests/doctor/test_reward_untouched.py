"""Measuring a reward model leaves no trace: the training afterwards is bit for bit the same."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

import driftscope
from driftscope.hooks.doctor.reward_facts import reward_facts
from driftscope.hooks.tiny import tiny_reward_model
from tests.doctor.reward_runs import reward_trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_everything_is_as_it_was(checkpointing, tmp_path):
    model = tiny_reward_model()
    config = driftscope.reward_lora_config(model)
    arguments = {"gradient_checkpointing": checkpointing, "disable_dropout": False, "max_steps": 3}
    ends = []
    for measure in (False, True):
        fresh = tiny_reward_model()
        with reward_trainer(tmp_path, fresh, peft_config=copy.deepcopy(config), **arguments) as trainer:
            if measure:
                _measure_and_compare(trainer)
            trainer.train()
            ends.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
            ends.append(
                [
                    {k: v for k, v in log.items() if "runtime" not in k and "per_second" not in k}
                    for log in trainer.state.log_history
                ]
            )
    assert all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])
    assert ends[1] == ends[3]


def _measure_and_compare(trainer):
    model = trainer.model
    some = next(p for p in model.parameters() if p.requires_grad)
    some.grad = torch.ones_like(some)
    gradient = some.grad
    trainer._metrics["train"]["accuracy"].append(0.5)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attributes = set(vars(trainer))
    settings = copy.deepcopy(model.config.to_dict())
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    reward_facts(trainer)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert some.grad is gradient
    assert bool((gradient == 1).all())
    assert model.config.to_dict() == settings
    assert set(vars(trainer)) == attributes
    assert {k: dict(v) for k, v in trainer._metrics.items()} == {"train": {"accuracy": [0.5]}, "eval": {}}
    assert trainer._total_train_tokens == 0
    some.grad = None
    trainer._metrics["train"].clear()
