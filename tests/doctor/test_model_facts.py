"""What is measured on the policy, and that nothing of it stays."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from driftscope.doctor import Settings
from driftscope.hooks.doctor.model_facts import model_facts
from driftscope.hooks.doctor.settings import settings_of
from tests.hooks import runs


def snapshot(trainer):
    model = trainer.model
    return {
        "values": [p.detach().clone() for p in model.parameters()],
        "identities": [(id(p), p.data_ptr(), p.dtype, p.requires_grad, p.grad) for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "forward": model.__dict__.get("forward"),
        "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),
        "metrics": copy.deepcopy({k: dict(v) for k, v in trainer._metrics.items()}),
        "config": model.config.to_dict(),
        "adapter": getattr(model, "active_adapter", None),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or a == b


RUNS = {
    "plain": {},
    "truncated, with reference": {"top_p": 0.8, "beta": 0.1},
    "bfloat16 weights": {"dtype": torch.bfloat16, "beta": 0.1},
    "mixed precision": {"bf16": True},
    "trained adapter": {"wrap": lambda m: get_peft_model(m, LoraConfig(r=4)), "beta": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("run", list(RUNS))
def test_the_trainer_is_left_as_it_was(run, tmp_path):
    with runs.trainer(tmp_path, **RUNS[run]) as trainer:
        trainer.model.train()
        next(iter(trainer.model.modules())).eval()  # a mode of its own
        settings = settings_of(trainer)
        before = snapshot(trainer)
        facts = model_facts(trainer, settings)
        after = snapshot(trainer)
    assert not facts.unavailable
    for name in before:
        assert same(before[name], after[name]), name


def test_the_next_steps_are_the_same_with_and_without_the_measurement(tmp_path):
    weights = []
    for measured in (False, True):
        run = {"top_p": 0.8, "beta": 0.1, "max_steps": 2}
        with runs.trainer(tmp_path / str(measured), **run) as trainer:
            if measured:
                model_facts(trainer, settings_of(trainer))
            trainer.train()
            weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert same(*weights)


def test_after_training_has_begun_the_noise_is_the_same(tmp_path):
    # accelerate has then put mixed precision into the model's own forward
    with runs.trainer(tmp_path, bf16=True, max_steps=1, learning_rate=0.0) as trainer:
        settings = settings_of(trainer)
        fresh = model_facts(trainer, settings)
        trainer.train()
        forward = trainer.model.__dict__["forward"]
        used = model_facts(trainer, settings)
        assert trainer.model.__dict__["forward"] is forward
    assert used.logp_noise == pytest.approx(fresh.logp_noise) and fresh.logp_noise > 1e-3


def test_what_cannot_be_had_says_why(tmp_path):
    with runs.trainer(tmp_path, top_p=0.8, beta=0.1) as trainer:
        settings = settings_of(trainer)
        data, trainer.train_dataset = trainer.train_dataset, None
        facts = model_facts(trainer, settings)
        trainer.train_dataset = data
        slow = model_facts(trainer, Settings(trainer="sft", values={"optim": "sgd", "learning_rate": 0.1}))
        trainer.is_fsdp_enabled = True
        sharded = model_facts(trainer, settings)
    assert (facts.kept_mass, facts.logp_noise, facts.reference_kl) == (None, None, None)
    for name in ("kept_mass", "logp_noise", "reference_kl", "log_collision"):
        assert "no train_dataset" in facts.unavailable[name]
    assert facts.lost_update_share is not None
    assert "sgd" in slow.unavailable["lost_update_share"] and slow.logp_noise is None
    assert "FSDP" in sharded.unavailable["lost_update_share"] and sharded.lost_update_share is None


def test_conversations_go_through_the_chat_template(tmp_path):
    from datasets import Dataset

    with runs.trainer(tmp_path) as trainer:
        trainer.train_dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1 w2"}]] * 4})
        assert model_facts(trainer, settings_of(trainer)).log_collision < 0
