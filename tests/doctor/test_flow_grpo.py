"""GRPO with LoRA where the backward raises or leaves adapters out: reproduced, predicted, mended, explained.

Everything is the installed TRL's GRPOTrainer, without vLLM, on a tiny model.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import driftscope
from driftscope.doctor import Facts, foresee
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.hooks.doctor.flow_subject import make_non_reentrant
from tests.hooks.runs import alerts_of, notes_of, trainer

NO_GRAPH = "element 0 of tensors does not require grad and does not have a grad_fn"
REENTRANT, NON_REENTRANT = {"use_reentrant": True}, {"use_reentrant": False}
TRANSFORMERS_4 = Version(transformers.__version__) < Version("5")
# What torch says where it is about to fail, before it does.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


def lora(**more):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | more)


def plain(model, **more):
    return get_peft_model(model, lora(**more))


def by_the_user(model, kwargs=REENTRANT, **more):
    """PEFT first, then checkpointing on the model: PEFT enabled no input gradients, and transformers 4 does not."""
    model = plain(model, **more)
    model.gradient_checkpointing_enable(kwargs)
    return model


def wrapped(model, impl=CheckpointImpl.REENTRANT, **more):
    """Blocks in torch's own checkpoint wrappers, of which neither TRL nor transformers knows."""
    model = plain(model, **more)
    layer = type(model.get_base_model().model.layers[0])
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: isinstance(module, layer),
    )
    return model


def inputs_disabled_later(made):
    made.model.disable_input_require_grads()


def nothing(made):
    pass


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}
FAILS = {"wrapped": (wrapped, nothing, {})}
if TRANSFORMERS_4:  # transformers 5 enables input gradients with every gradient_checkpointing_enable
    FAILS |= {
        "by the user": (by_the_user, nothing, {}),
        "by the user, with arguments": (by_the_user, nothing, {"gradient_checkpointing_kwargs": REENTRANT}),
        "disabled later": (plain, inputs_disabled_later, CHECKPOINTED),
    }
TRAINS = {
    "plain": (plain, nothing, {}),
    "checkpointed": (plain, nothing, CHECKPOINTED),
    "non-reentrant": (plain, nothing, CHECKPOINTED | {"gradient_checkpointing_kwargs": NON_REENTRANT}),
}
if not TRANSFORMERS_4:
    TRAINS |= {
        "by the user": (by_the_user, nothing, {}),
        "disabled later": (plain, inputs_disabled_later, CHECKPOINTED),
    }


@contextmanager
def grpo(directory, wrap, **overrides):
    settings = {"use_vllm": False, "gradient_accumulation_steps": 1, "max_completion_length": 6} | overrides
    with trainer(directory, wrap=wrap, **settings) as made:
        yield made


def trainable(model):
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


def lora_b(model):
    """Names of the lora_B weights, those that are zero apart."""
    named = {n: bool(torch.any(p)) for n, p in model.named_parameters() if "lora_B" in n}
    return {n for n, moved in named.items() if moved}, {n for n, moved in named.items() if not moved}


def assert_every_adapter_moved(made):
    moved, still = lora_b(made.model)
    assert len(moved) == 4 and not still


@pytest.mark.parametrize("case", FAILS)
def test_the_failure_is_predicted_and_comes(tmp_path, case):
    wrap, before, overrides = FAILS[case]
    with grpo(tmp_path, wrap, **overrides) as made:
        before(made)
        flow = gradient_flow(made)
        assert flow.missing == trainable(made.model) and flow.trainable == 8
        assert NO_GRAPH in flow.error and flow.cut_kind == "reentrant"
        assert flow.cut_at == "base_model.model.model.layers.0"
        found = foresee(Facts(flow=flow))
        assert found.rules == ("DS301", "DS303")
        assert "model.enable_input_require_grads()" in found[0].remedy and "8 of 8" in found[0].evidence
        with pytest.raises(RuntimeError, match=NO_GRAPH):
            made.train()


@pytest.mark.parametrize("case", TRAINS)
def test_no_failure_is_predicted_where_none_comes(tmp_path, case):
    wrap, before, overrides = TRAINS[case]
    with grpo(tmp_path, wrap, **overrides) as made:
        before(made)
        flow = gradient_flow(made)
        assert flow.ok and flow.fixes == ()
        assert foresee(Facts(flow=flow)).rules == ()
        made.train()
        assert_every_adapter_moved(made)


def test_the_model_as_it_stands_is_predicted_too(tmp_path):
    with grpo(tmp_path, wrapped) as made:
        assert gradient_flow(made.model).missing == trainable(made.model)


def enabled(model):
    model.enable_input_require_grads()
    return model


FIXED = {
    ("wrapped", "enable_input_require_grads"): (lambda m: enabled(wrapped(m)), {}),
    ("wrapped", "use_reentrant=False"): (lambda m: wrapped(m, CheckpointImpl.NO_REENTRANT), {}),
    ("wrapped", "gradient_checkpointing=False"): (plain, {}),
    ("by the user", "enable_input_require_grads"): (lambda m: enabled(by_the_user(m)), {}),
    ("by the user", "use_reentrant=False"): (by_the_user, {"gradient_checkpointing_kwargs": NON_REENTRANT}),
    ("by the user", "gradient_checkpointing=False"): (plain, {"gradient_checkpointing": False}),
}


@pytest.mark.parametrize(("case", "name"), [key for key in FIXED if key[0] in FAILS])
def test_each_remedy_makes_the_real_trainer_train(tmp_path, case, name):
    broken, _, overrides = FAILS[case]
    with grpo(tmp_path / "broken", broken, **overrides) as made:
        tried = {fix.name: fix for fix in gradient_flow(made).fixes}
    assert list(tried) == ["enable_input_require_grads", "use_reentrant=False", "gradient_checkpointing=False"]
    assert tried[name].works and tried[name].saved_bytes > 0
    assert tried["gradient_checkpointing=False"].saved_bytes > 2 * tried["use_reentrant=False"].saved_bytes
    wrap, more = FIXED[case, name]
    with grpo(tmp_path / "fixed", wrap, **overrides | more) as made:
        assert gradient_flow(made).ok
        made.train()
        assert_every_adapter_moved(made)


@pytest.mark.skipif(not TRANSFORMERS_4, reason="transformers 5 enables input gradients with checkpointing")
def test_non_reentrant_on_the_model_alone_is_undone_by_trls_generation(tmp_path):
    """TRL switches checkpointing on again with its own arguments: the remedy belongs into the configuration."""
    with grpo(tmp_path, partial(by_the_user, kwargs=NON_REENTRANT)) as made:
        assert gradient_flow(made.model).ok
        assert not gradient_flow(made).ok
        with pytest.raises(RuntimeError, match=NO_GRAPH):
            made.train()


class ByKeyword(nn.Module):
    """Calls a layer with its hidden states by keyword, of which reentrant checkpointing keeps no graph."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, hidden_states, **kwargs):
        return self.layer(hidden_states=hidden_states, **kwargs)


def by_keyword(model, **more):
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = ByKeyword(layer)
    return plain(model, **more)


def test_hidden_states_by_keyword_need_non_reentrant_checkpointing(tmp_path):
    """The one that input gradients do not mend, in every stack: TRL enables them here."""
    with grpo(tmp_path / "broken", by_keyword, **CHECKPOINTED) as made:
        flow = gradient_flow(made)
        assert flow.cut_kind == "reentrant-keyword" and flow.missing == trainable(made.model)
        assert [fix.works for fix in flow.fixes] == [False, True, True]
        remedy = foresee(Facts(flow=flow))[0].remedy
        assert remedy.startswith('GRPOConfig(gradient_checkpointing_kwargs={"use_reentrant": False})')
        with pytest.raises(RuntimeError, match=NO_GRAPH):
            made.train()
    mended = CHECKPOINTED | {"gradient_checkpointing_kwargs": NON_REENTRANT}
    with grpo(tmp_path / "fixed", by_keyword, **mended) as made:
        made.train()
        assert_every_adapter_moved(made)


class Detached(nn.Module):
    """A layer whose output is detached, as a hook or a custom block may do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).detach()


def with_a_head(model):
    return wrapped(model, modules_to_save=["lm_head"])


def with_a_detached_mlp(model):
    layer = model.model.layers[0]
    layer.mlp = Detached(layer.mlp)
    return plain(model, target_modules=["q_proj", "up_proj"])


def with_an_unused_module(model):
    model.spare = nn.ModuleDict({"proj": nn.Linear(4, 4)})
    return plain(model, target_modules=["q_proj", "proj"])


SILENT = {
    "a head and cut adapters": (with_a_head, "base_model.model.model.layers.0", "critical"),
    "a detached output": (with_a_detached_mlp, "base_model.model.model.layers.0.mlp", "warning"),
    "an unused module": (with_an_unused_module, "base_model.model.spare.proj", "warning"),
}


@pytest.mark.parametrize("case", SILENT)
def test_the_silent_form_is_predicted_as_a_real_training_shows_it(tmp_path, case):
    wrap, place, severity = SILENT[case]
    with grpo(tmp_path, wrap) as made:
        flow = gradient_flow(made)
        assert flow.error is None and flow.cut_at == place
        found = foresee(Facts(flow=flow))
        assert "DS302" in found.rules and "DS301" not in found.rules
        assert next(f for f in found if f.rule == "DS302").severity == severity
        assert ("DS303" in found.rules) == (case == "a head and cut adapters")
        made.train()
        _, still = lora_b(made.model)
        assert still == {name for name in flow.missing if "lora_B" in name} != set()


def test_the_head_trains_while_the_adapters_do_not_and_a_remedy_mends_it(tmp_path):
    with grpo(tmp_path, with_a_head) as made:
        head = made.model.base_model.model.lm_head.modules_to_save["default"].weight
        before = head.detach().clone()
        best = gradient_flow(made).fixes[0]
        assert best.works and best.name == "enable_input_require_grads"
        made.train()
        assert not torch.equal(head, before) and lora_b(made.model)[0] == set()
    with grpo(tmp_path, lambda m: enabled(with_a_head(m))) as made:
        made.train()
        assert_every_adapter_moved(made)


def test_a_failed_backward_is_explained_afterwards(tmp_path):
    run_dir = tmp_path / "run"
    with grpo(tmp_path, wrapped) as made:
        scope = driftscope.attach(made, run_dir=run_dir, console=False)
        with pytest.raises(RuntimeError, match=NO_GRAPH) as caught:
            made.train()
        weights = {n: p.grad for n, p in made.model.named_parameters()}
        scope.detach()
    (note,) = caught.value.__notes__
    assert note.startswith("driftscope DS301") and "model.enable_input_require_grads()" in note
    alerts = [alert for alert in alerts_of(run_dir) if alert.rule == "DS301"]
    assert len(alerts) == 1 and alerts[0].severity == "critical" and alerts[0].step == 1
    assert "8 of 8 trainable parameters" in alerts[0].evidence
    assert [note for note in notes_of(run_dir) if note.stage == "gradient_flow"] == []
    assert all(grad is None for grad in weights.values())


def test_a_loss_cut_from_a_healthy_model_is_told_apart(tmp_path):
    with grpo(tmp_path, plain) as made:
        compute = made.compute_loss
        made.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs).detach()
        scope = driftscope.attach(made, run_dir=tmp_path / "run", console=False)
        with pytest.raises(RuntimeError, match=NO_GRAPH) as caught:
            made.train()
        scope.detach()
    assert any("own backward works" in note for note in caught.value.__notes__)


def test_other_errors_pass_without_a_word(tmp_path):
    def broken(*args, **kwargs):
        raise RuntimeError("something else")

    with grpo(tmp_path, plain) as made:
        made.compute_loss = broken
        scope = driftscope.attach(made, run_dir=tmp_path / "run", console=False)
        with pytest.raises(RuntimeError, match="something else") as caught:
            made.train()
        scope.detach()
    assert getattr(caught.value, "__notes__", []) == []
    assert (tmp_path / "run" / "records.jsonl").read_text() == ""


def test_a_trainer_that_was_checked_trains_to_the_same_weights(tmp_path):
    """Bit for bit, with dropout, sampling and checkpointing; and its arguments and metrics are as they were."""

    def seeded(model):
        torch.manual_seed(5)  # lora_A is random, and drawn before TRL sets its seed
        return plain(model, lora_dropout=0.2)

    def train(directory, check):
        with grpo(directory, seeded, **CHECKPOINTED) as made:
            if check:
                arguments, metrics = made.args.to_dict(), {k: dict(v) for k, v in made._metrics.items()}
                assert gradient_flow(made).ok
                assert made.args.to_dict() == arguments and made._metrics == metrics
                assert not made.model.is_gradient_checkpointing, "as before train()"
            made.train()
            return {n: p.detach().clone() for n, p in made.model.named_parameters()}

    plainly, checked = train(tmp_path / "a", check=False), train(tmp_path / "b", check=True)
    assert all(torch.equal(plainly[name], checked[name]) for name in plainly)


def test_wrappers_can_be_made_non_reentrant(tmp_path):
    with grpo(tmp_path, wrapped) as made:
        assert make_non_reentrant(made.model) == 2
        made.train()
        assert_every_adapter_moved(made)
