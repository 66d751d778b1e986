"""The gradient check leaves the model as it was, bit for bit; also where it raises."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from peft import LoraConfig, get_peft_model

from driftscope.errors import UsageError
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.hooks.tiny import tiny_model

ROWS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
TABLES = (*ROWS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def state(model):
    """Everything that a check could leave behind, with the identity of what must stay the same object."""
    modules = {}
    for name, module in model.named_modules():
        plain = {k: id(v) for k, v in module.__dict__.items() if k not in ("training",)}
        tables = {table: [(k, id(v)) for k, v in getattr(module, table).items()] for table in TABLES}
        modules[name] = (module.training, plain, tables, [id(m) for m in module._modules.values()])
    configs = {id(m.config): dict(m.config.__dict__) for m in model.modules() if hasattr(m, "config")}
    return {
        "modules": modules,
        "configs": {k: {n: repr(v) for n, v in c.items()} for k, c in configs.items()},
        "parameters": {n: (id(p), p.requires_grad, id(p.grad), p.dtype) for n, p in model.named_parameters()},
        "values": {n: p.detach().clone() for n, p in model.named_parameters()},
        "gradients": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
    }


def assert_same(before, after):
    for part in ("modules", "configs", "parameters"):
        assert before[part] == after[part]
    for part in ("values", "gradients", "buffers"):
        assert before[part].keys() == after[part].keys()
        assert all(torch.equal(before[part][n], after[part][n]) for n in before[part])


def randoms():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def lora(**more):
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.3} | more
    )


def adapted():
    return get_peft_model(tiny_model("qwen2", attention_dropout=0.2), lora())


def by_the_user():
    model = adapted()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    if getattr(model.get_base_model(), "_require_grads_hooks", None):
        model.disable_input_require_grads()
    return model


def with_input_gradients():
    model = by_the_user()
    model.enable_input_require_grads()
    return model


def native():
    model = tiny_model("llama")
    model.add_adapter(lora())
    model._set_gradient_checkpointing(True, partial(torch.utils.checkpoint.checkpoint, use_reentrant=True))
    return model


def lived_in(model):
    """Gradients, hooks, mixed modes and a buffer that a forward changes."""
    for i, parameter in enumerate(model.parameters()):
        if i % 2:
            parameter.grad = torch.full_like(parameter, float(i))
    model.eval()
    next(m for n, m in model.named_modules() if n.endswith("layers.1")).train()
    first = next(m for n, m in model.named_modules() if n.endswith("layers.0"))
    first.register_buffer("count", torch.zeros(1))
    first.register_forward_hook(lambda module, args, output: module.count.add_(1) and None)
    model.config.use_cache = True
    return model


MAKERS = (adapted, by_the_user, with_input_gradients, native)


@pytest.mark.parametrize("make", MAKERS)
def test_the_model_is_as_it_was(make):
    model = lived_in(make())
    before, drawn = state(model), randoms()
    flow = gradient_flow(model)
    assert flow.trainable == 8
    assert_same(before, state(model))
    assert randoms() == drawn


@pytest.mark.parametrize("make", MAKERS)
def test_it_is_so_after_a_batch_that_does_not_fit(make):
    model = lived_in(make())
    before, drawn = state(model), randoms()
    ids = torch.arange(6).view(2, 3)
    with pytest.raises(UsageError, match="does not fit"):
        gradient_flow(model, {"input_ids": ids, "labels": torch.zeros(2, 5, dtype=torch.long)})
    with pytest.raises(UsageError, match="vocabulary"):
        gradient_flow(model, {"input_ids": ids + 10**6})
    assert_same(before, state(model))
    assert randoms() == drawn


def test_hooks_of_input_gradients_can_still_be_removed():
    model = with_input_gradients()
    assert gradient_flow(model).ok
    model.disable_input_require_grads()
    assert not gradient_flow(model).ok


def test_an_optimizer_in_the_backward_does_not_step():
    model = adapted()
    stepped = []
    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(stepped.append) for p in trained]
    assert gradient_flow(model).ok
    assert stepped == []
    model(input_ids=torch.arange(8).view(1, 8)).logits.sum().backward()
    assert len(stepped) == 8, "the hooks are back"
    handles[0].remove()


def test_the_batch_is_as_it_was():
    ids = torch.arange(8).view(1, 8)
    batch = {"input_ids": ids, "labels": ids.clone()}
    gradient_flow(adapted(), batch)
    assert list(batch) == ["input_ids", "labels"] and batch["input_ids"] is ids
    assert torch.equal(ids, torch.arange(8).view(1, 8))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(context):
    model = adapted()
    with context():
        assert gradient_flow(model).ok
        assert not torch.is_grad_enabled()


def test_torchs_checkpointing_is_torchs_own_again():
    before = patched()
    gradient_flow(by_the_user())
    with pytest.raises(UsageError):
        gradient_flow(by_the_user(), {"input_ids": torch.arange(4).view(1, 4), "labels": torch.zeros(1)})
    assert before == patched()


def patched():
    module = torch.utils.checkpoint
    return module.CheckpointFunction, module._checkpoint_without_reentrant_generator


def test_training_goes_on_as_if_nothing_had_been_checked():
    """The same weights after three steps with dropout, with the check between the steps and without."""

    def train(check):
        torch.manual_seed(3)
        model = with_input_gradients().train()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ids = torch.arange(16).view(2, 8)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            if check:
                assert gradient_flow(model).ok
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
