"""``driftscope.diagnose`` on real trainers and models: honest ones are quiet, broken ones told, none is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import driftscope
from driftscope.hooks.tiny import tiny_model
from tests.hooks.runs import trainer


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def state(made: Any) -> tuple[Any, ...]:
    weights = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    modes = [m.training for m in made.model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in made.model.modules()]
    metrics = {mode: dict(values) for mode, values in made._metrics.items()}
    return weights, modes, hooks, metrics, torch.get_rng_state(), made.state.global_step


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    weights = a[0].keys() == b[0].keys() and all(torch.equal(a[0][n], b[0][n]) for n in a[0])
    return weights and a[1:4] == b[1:4] and torch.equal(a[4], b[4]) and a[5] == b[5]


def test_an_honest_grpo_trainer_has_no_warning_and_stays_as_it_was(tmp_path: Any):
    with trainer(tmp_path, num_generations=8, per_device_train_batch_size=8, wrap=lora, bf16=False) as made:
        before = state(made)
        found = driftscope.diagnose(made)
        assert same(before, state(made))
        made.train()
    assert [f for f in found if f.severity != "info"] == []
    assert not found.failed
    assert found.facts.stack is not None
    assert found.facts.flow is not None
    assert found.facts.flow.ok
    assert found.facts.settings is not None
    assert found.facts.settings.trainer == "grpo"


def test_a_biased_sampler_and_a_fused_path_are_told_worst_first(tmp_path: Any, stack: Any):
    with trainer(tmp_path, liger=stack.has_liger_loss, top_p=0.8, wrap=lora) as made:
        found = driftscope.diagnose(made)
    assert "DS201" in found.rules
    assert ("DS102" in found.rules) == (stack.trl < (0, 29))
    order = ["critical", "warning", "info"]
    ranks = [order.index(f.severity) for f in found]
    assert ranks == sorted(ranks)
    finding = next(f for f in found if f.rule == "DS201")
    assert finding.title
    assert finding.evidence
    assert "top_p=1.0" in finding.remedy
    assert found.facts.model is not None
    assert found.facts.model.kept_mass == pytest.approx(0.8, abs=0.02)


def test_select_and_ignore(tmp_path: Any):
    with trainer(tmp_path, top_p=0.8) as made:
        assert set(driftscope.diagnose(made, select=["DS2"], stack=False).rules) >= {"DS201"}
        assert "DS201" not in driftscope.diagnose(made, ignore=["DS201"], stack=False).rules
        with pytest.raises(driftscope.UsageError, match="no rule or group"):
            driftscope.diagnose(made, select=["DS9x"])


def test_a_model_alone_can_be_diagnosed():
    model = lora(tiny_model())
    assert list(driftscope.diagnose(model)) == []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = driftscope.diagnose(model)
    assert found.facts.flow is not None
    assert found.facts.flow.trainable == 0


@pytest.mark.parametrize("subject", [None, "model", 3, object()])
def test_what_is_neither_trainer_nor_model_is_refused(subject: Any):
    with pytest.raises(driftscope.UsageError, match="neither a trainer nor a model"):
        driftscope.diagnose(subject)


def test_an_adapter_can_be_tried_before_it_is_put_on_a_reward_model():
    from driftscope.hooks.tiny import tiny_reward_model

    model = tiny_reward_model("llama")
    names = [n for n, _ in model.named_parameters()]
    good = driftscope.diagnose(model, peft_config=driftscope.reward_lora_config(model))
    assert [f.rule for f in good if f.severity != "info"] == []
    bad = driftscope.diagnose(model, peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert "DS304" in bad.rules
    assert [n for n, _ in model.named_parameters()] == names
    with pytest.raises(driftscope.UsageError, match="is no reward model"):
        driftscope.diagnose(tiny_model(), peft_config=driftscope.reward_lora_config(model))
