"""``reward_lora_config`` and ``find_head`` on real architectures and the installed PEFT."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification
from trl import ModelConfig, get_peft_config

import driftscope
from driftscope.errors import UsageError
from driftscope.hooks.doctor.reward import find_head, reward_lora_config
from driftscope.hooks.doctor.reward_head import head_modules
from driftscope.hooks.tiny import tiny_model, tiny_reward_model

ARCHS = ("qwen2", "llama", "gemma2", "mistral", "gpt2")
# Architectures whose head has another name, or other modules with weights before it.
OTHERS = {
    "ctrl": ({"n_embd": 32, "n_layer": 1, "n_head": 2, "dff": 32}, ("classifier",)),
    "xlnet": ({"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}, ("sequence_summary", "logits_proj")),
    "bart": (
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "eos_token_id": 4,
        },
        ("classification_head",),
    ),
}


def other(name):
    config = AutoConfig.for_model(name, num_labels=1, vocab_size=64, **OTHERS[name][0])
    return AutoModelForSequenceClassification.from_config(config)


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_head_is_found_on_the_model_and_nothing_is_left_behind(arch):
    model = tiny_reward_model(arch).train()
    model.get_submodule("score").eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    assert find_head(model) == "score"
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("arch", [*ARCHS, "cohere"])
def test_a_language_model_and_a_base_model_have_none(arch):
    model = tiny_model(arch)
    assert find_head(model) is None
    assert find_head(model.base_model) is None


@pytest.mark.parametrize("name", OTHERS)
def test_a_head_of_another_name_is_found_by_structure(name):
    assert head_modules(other(name)) == OTHERS[name][1]


def test_the_name_alone_does_not_make_a_head():
    model = tiny_reward_model()
    model.classifier = torch.nn.Linear(64, 1)  # has the name, does not take part
    model.reward_out = model.score
    del model.score
    forward = type(model).forward
    type_of = type("Renamed", (type(model),), {"score": property(lambda self: self.reward_out), "forward": forward})
    model.__class__ = type_of
    assert find_head(model) == "reward_out"
    config = reward_lora_config(model)
    assert "reward_out" in config.modules_to_save


@pytest.mark.parametrize("arch", ARCHS)
def test_the_configuration_trains_the_head_in_full_and_adapts_the_rest(arch):
    model = tiny_reward_model(arch)
    config = reward_lora_config(model, r=4)
    assert isinstance(config, LoraConfig)
    assert config.task_type == "SEQ_CLS"
    assert config.modules_to_save == ["score"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 32, 0.05)
    adapted = get_peft_model(model, config)  # warnings are errors: GPT-2's layers want fan_in_fan_out
    names = trainable(adapted)
    assert [n for n in names if "lora_" not in n] == ["base_model.model.score.modules_to_save.default.weight"]
    assert len(names) > 4
    assert not any("lora_" in n and "score" in n for n in names)
    assert find_head(adapted) == "score"


@pytest.mark.parametrize("name", ["xlnet", "bart"])
def test_all_that_a_language_models_checkpoint_lacks_is_saved(name):
    adapted = get_peft_model(other(name), reward_lora_config(other(name)))
    names = trainable(adapted)
    for head in OTHERS[name][1]:
        assert any(f".{head}.modules_to_save.default." in n for n in names)
        assert not any("lora_" in n and f".{head}." in n for n in names)


@pytest.mark.parametrize("name", ["xlnet", "bart"])
def test_peft_alone_does_not_save_a_head_of_another_name(name):
    config = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
    saved = [n for n in trainable(get_peft_model(other(name), config)) if "modules_to_save" in n]
    assert not saved


def test_the_public_name_is_the_same_function():
    assert driftscope.reward_lora_config is reward_lora_config


def test_the_fields_of_trls_model_config_are_taken_as_trl_takes_them():
    fields = {
        "use_peft": True,
        "lora_r": 3,
        "lora_alpha": 7,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj", "k_proj"],
        "lora_modules_to_save": ["embed_tokens"],
        "use_rslora": True,
    }
    theirs = get_peft_config(ModelConfig(**fields, lora_task_type="SEQ_CLS"))
    ours = reward_lora_config(tiny_reward_model(), model_config=ModelConfig(**fields))
    assert theirs.modules_to_save == ["embed_tokens"]
    assert ours.modules_to_save == ["score", "embed_tokens"]
    left, right = theirs.to_dict(), ours.to_dict()
    left.pop("modules_to_save"), right.pop("modules_to_save")
    assert left == right


def test_defaults_are_those_of_trls_model_config():
    left = reward_lora_config(tiny_reward_model()).to_dict()
    assert left == reward_lora_config(tiny_reward_model(), model_config=ModelConfig()).to_dict()


def test_target_parameters_reach_peft():
    config = ModelConfig(lora_target_parameters=["q_proj.weight"])
    made = reward_lora_config(tiny_reward_model(), model_config=config)
    assert made.target_parameters == ["q_proj.weight"]
    assert made.target_modules is None


def test_every_linear_layer_but_the_head():
    for model in (tiny_reward_model(), other("bart")):
        adapted = get_peft_model(model, reward_lora_config(model, target_modules="all-linear"))
        heads = head_modules(adapted)
        touched = [n for n in trainable(adapted) if "lora_" in n]
        assert touched
        assert not any(f".{head}." in n for n in touched for head in heads)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task_type": "CAUSAL_LM"}, "leave task_type out"),
        ({"r": 8, "model_config": ModelConfig()}, "r given beside model_config"),
        ({"target_modules": ["q_proj"], "model_config": ModelConfig()}, "target_modules given beside"),
        ({"model_config": 3}, "int without lora_r"),
        ({"modules_to_save": ["scor"]}, "did you mean 'score'"),
        ({"modules_to_save": ["zzzz"]}, "leave it out"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(arguments, words):
    with pytest.raises(UsageError, match=words):
        reward_lora_config(tiny_reward_model(), **arguments)


def test_models_that_it_cannot_be_made_for_are_refused_with_the_remedy():
    model = tiny_reward_model()
    with pytest.raises(UsageError, match=r"Qwen2ForCausalLM has no head .* num_labels=1"):
        reward_lora_config(tiny_model())
    with pytest.raises(UsageError, match="Qwen2Model has no head"):
        reward_lora_config(model.model)
    with pytest.raises(UsageError, match="CohereForCausalLM has no head"):
        reward_lora_config(tiny_model("cohere"))
    with pytest.raises(UsageError, match="was given a str; load the model first"):
        reward_lora_config("path")
    with pytest.raises(UsageError, match="has an adapter already"):
        reward_lora_config(get_peft_model(copy.deepcopy(model), reward_lora_config(model)))
    with pytest.raises(UsageError, match="does not run on one short sequence"):
        reward_lora_config(torch.nn.Linear(2, 2))


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="pip install peft"):
        reward_lora_config(tiny_reward_model())
