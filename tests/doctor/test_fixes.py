"""What ``fix`` applies, checks, takes back, and leaves to the user."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from driftscope.errors import UsageError
from driftscope.hooks.doctor.fixes import Fix, fix
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.hooks.tiny import tiny_model, tiny_tokenizer
from tests.doctor.test_flow import SHAPE, Keyword, adapted, cut, trainable
from tests.doctor.test_flow_grpo import (
    CHECKPOINTED,
    FAILS,
    assert_every_adapter_moved,
    by_keyword,
    grpo,
    plain,
    wrapped,
)

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@pytest.mark.parametrize("code", ["DS301", "DS303"])
def test_a_cut_model_gets_input_gradients(code):
    model = cut(adapted())
    (done,) = fix(model, [code])
    assert done == Fix(code, True, "model.enable_input_require_grads()", done.why)
    assert "All 8 trainable parameters get a gradient" in done.why
    assert gradient_flow(model).ok


def test_what_is_found_is_fixed_once_and_then_nothing_is_left():
    model = cut(adapted())
    first, *rest = fix(model)
    assert first.rule == "DS301" and first.applied
    assert [(f.rule, f.applied) for f in rest] == [("DS303", False)] and "nothing is left" in rest[0].why
    assert fix(model) == []


@pytest.mark.parametrize("case", FAILS)
def test_a_trainer_trains_after_the_fix(tmp_path, case):
    wrap, before, overrides = FAILS[case]
    with grpo(tmp_path, wrap, **overrides) as made:
        before(made)
        done = fix(made, ["DS301"])
        assert done[0].applied
        made.train()
        assert_every_adapter_moved(made)


def test_it_falls_back_to_non_reentrant_checkpointing(tmp_path):
    with grpo(tmp_path, by_keyword, **CHECKPOINTED) as made:
        (done,) = fix(made, ["DS303"])
        assert done.applied and "use_reentrant" in done.action
        assert made.args.gradient_checkpointing_kwargs == {"use_reentrant": False}
        made.train()
        assert_every_adapter_moved(made)


def test_wrappers_are_turned_where_there_are_no_embeddings_to_hook():
    model = wrapped(tiny_model("qwen2"))
    model.enable_input_require_grads = None
    model.get_base_model().get_input_embeddings = model.get_input_embeddings = no_embeddings
    assert [f.works for f in gradient_flow(model).fixes] == [False, True, True]
    (done,) = fix(model, ["DS303"])
    assert done.applied and "use_reentrant=False" in done.action
    assert gradient_flow(model).checkpointing == "non-reentrant"


def no_embeddings():
    raise NotImplementedError


def test_a_fix_that_only_gives_memory_up_is_left_to_the_user():
    model = Keyword(keyword=True)
    model.get_input_embeddings = lambda: model.embed
    ids = {"input_ids": torch.arange(8).view(1, 8)}
    assert [f.works for f in gradient_flow(model, ids).fixes] == [False, True, True]
    (done,) = fix(model, ["DS303"])
    assert not done.applied
    assert "taken back" in done.why  # the block calls checkpoint itself: nothing on the model turns it
    assert not gradient_flow(model, ids).ok


def test_a_silent_cut_that_nothing_mends_is_left_with_its_remedy():
    base = tiny_model("qwen2")
    base.spare = nn.ModuleDict({"proj": nn.Linear(4, 4)})
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "proj"], task_type="CAUSAL_LM"))
    (done,) = fix(model)
    assert (done.rule, done.applied) == ("DS302", False)
    assert "target_modules" in done.action and "spare.proj" in done.why


def test_a_healthy_target_is_left_alone(tmp_path):
    with grpo(tmp_path, plain) as made:
        before = {n: p.requires_grad for n, p in made.model.named_parameters()}
        assert [f for f in fix(made) if f.applied] == []
        (done,) = fix(made, ["DS301"])
        assert not done.applied and "every trainable parameter" in done.why
        assert before == {n: p.requires_grad for n, p in made.model.named_parameters()}


def classifier(pad=None, frozen=False):
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SHAPE | {"pad_token_id": pad, "vocab_size": 512}, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.requires_grad_(not frozen)
    return model


class Trainer:
    """The least that a trainer has, for what RewardTrainer sets by itself."""

    def __init__(self, model, tokenizer):
        self.model, self.processing_class, self.args, self.optimizer = model, tokenizer, None, None


def test_the_pad_token_is_the_tokenizers():
    model, tokenizer = classifier(), tiny_tokenizer()
    with pytest.raises(UsageError, match="padding token"):
        gradient_flow(model, {"input_ids": torch.arange(6).view(2, 3)})
    (done,) = fix(Trainer(model, tokenizer), ["DS309"])
    assert done.applied and done.action == f"model.config.pad_token_id = {tokenizer.pad_token_id}"
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert gradient_flow(model, {"input_ids": torch.arange(6).view(2, 3)}).ok
    (again,) = fix(Trainer(model, tokenizer), ["DS309"])
    assert not again.applied and "nothing is left" in again.why


def test_without_a_tokenizer_the_pad_token_is_left_to_the_user():
    model = classifier()
    (done,) = fix(model, ["DS309"])
    assert not done.applied and "tokenizer" in done.why and "pad_token_id" in done.action
    assert model.config.pad_token_id is None


def test_a_pad_token_that_does_not_help_is_taken_back():
    model, tokenizer = classifier(), tiny_tokenizer(1024)  # its pad token is outside the model's vocabulary
    (done,) = fix(Trainer(model, tokenizer), ["DS309"])
    assert not done.applied and "taken back" in done.why
    assert model.config.pad_token_id is None


def test_a_frozen_head_is_let_train_without_peft():
    model = classifier(pad=0, frozen=True)
    (done,) = fix(model, ["DS306"])
    assert done.applied and done.action == "model.score.requires_grad_(True)"
    assert model.score.weight.requires_grad
    (again,) = fix(model, ["DS306"])
    assert not again.applied and "trainable" in again.why


def test_a_frozen_head_under_peft_is_left_with_the_line():
    model = get_peft_model(classifier(pad=0), LoraConfig(r=4, target_modules=["q_proj"]))
    before = trainable(model)
    (done,) = fix(model, ["DS306"])
    assert not done.applied and 'modules_to_save=["score"]' in done.action and "get_peft_model" in done.why
    assert trainable(model) == before


def test_a_head_that_peft_saves_is_trainable_already():
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    (done,) = fix(get_peft_model(classifier(pad=0), config), ["DS306"])
    assert not done.applied and "nothing is left" in done.why


def test_other_rules_are_left_with_their_remedy():
    (done,) = fix(adapted(), ["DS201"])
    assert not done.applied and "top_p" in done.action and "safe" in done.why


def test_wrong_use_is_refused():
    with pytest.raises(UsageError, match="no rule is called 'DS999'"):
        fix(adapted(), ["DS999"])
    with pytest.raises(UsageError, match="neither"):
        fix(3)
