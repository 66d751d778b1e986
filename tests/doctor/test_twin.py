"""The twin: TRL's real trainer of a configuration, on a shrunk random copy of each architecture."""

from __future__ import annotations

import json
import os

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, T5Config

from driftscope.errors import UsageError
from driftscope.hooks.doctor.model_facts import copy_facts
from driftscope.hooks.doctor.settings import load_settings
from driftscope.hooks.doctor.twin import build_twin
from driftscope.hooks.tiny import tiny_tokenizer

BIG = {
    "vocab_size": 900,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHS = {
    "qwen2": {},
    "llama": {"num_key_value_heads": 6},
    "gemma2": {"num_key_value_heads": 3, "head_dim": 24, "query_pre_attn_scalar": 24, "final_logit_softcapping": 7.0},
    "cohere": {"logit_scale": 0.25},
    "mistral": {},
    "gpt2": {},
}
REENTRANT = ("--gradient_checkpointing_kwargs", '{"use_reentrant": true}')
ENCODER = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 64}


def saved(directory, arch="qwen2", tokenizer=False, auto=AutoModelForCausalLM, **more):
    """A model of this architecture on disk, as a user's."""
    values = dict(BIG)
    if arch == "gpt2":
        values = {"vocab_size": 900, "n_embd": 96, "n_layer": 5, "n_head": 6, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(arch, **values | ARCHS.get(arch, {}) | more)
    auto.from_config(config).save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer(900).save_pretrained(directory)
    return str(directory)


def settings(kind, model, *words):
    return load_settings(None, ["trl", kind, "--model_name_or_path", model, *words])


@pytest.mark.parametrize("arch", list(ARCHS))
def test_a_grpo_twin_keeps_the_architecture_and_trains(arch, tmp_path):
    model = saved(tmp_path / "m", arch)
    # Hot, so that the random copies' completions differ and the group has an advantage.
    run = settings("grpo", model, "--beta", "0.1", "--temperature", "4", *REENTRANT)
    with build_twin(run, tmp_path) as trainer:
        config = trainer.model.config
        assert config.model_type == arch
        assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (2, 64, 512)
        for name in ("final_logit_softcapping", "logit_scale", "tie_word_embeddings"):
            assert getattr(config, name, None) == getattr(AutoConfig.from_pretrained(model), name, None)
        assert trainer.args.gradient_checkpointing_kwargs == {"use_reentrant": True}
        assert trainer.beta == 0.1 and not trainer.use_vllm
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        assert trainer.state.global_step == 1
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "cohere"])  # has no sequence classification model
def test_a_reward_twin_has_the_adapter_that_trl_makes_of_the_settings(arch, tmp_path):
    words = ["--use_peft", "--lora_r", "4", "--lora_task_type", "SEQ_CLS", "--lora_modules_to_save", "score"]
    with build_twin(settings("reward", saved(tmp_path / "m", arch), *words), tmp_path) as trainer:
        adapter = trainer.model.peft_config["default"]
        assert (adapter.r, adapter.task_type) == (4, "SEQ_CLS")
        trainer.train()
        assert trainer.state.global_step == 1


def test_the_trained_dtypes_of_the_copy_are_those_of_the_run(tmp_path):
    model = saved(tmp_path / "m")
    with build_twin(settings("grpo", model, "--dtype", "bfloat16"), tmp_path / "a") as trainer:
        facts = copy_facts(trainer)
    assert (facts.copy, facts.dtype, facts.model_type) == (True, "bfloat16", "qwen2")
    with build_twin(settings("grpo", model, "--dtype", "bfloat16", "--use_peft"), tmp_path / "b") as trainer:
        assert set(copy_facts(trainer).dtypes) == {"float32"}


def test_a_classifiers_head_is_kept_and_a_language_models_is_as_trl_makes_it(tmp_path, stack):
    given = saved(tmp_path / "c", auto=AutoModelForSequenceClassification, num_labels=1)
    with build_twin(settings("reward", given), tmp_path / "t") as trainer:
        assert trainer.model.score.weight.shape == (1, 64)
    # TRL 0.27.2 leaves num_labels to the model's configuration, whose default is 2.
    with build_twin(settings("reward", saved(tmp_path / "m")), tmp_path / "u") as trainer:
        assert trainer.model.score.weight.shape == (2 if stack.name == "seed" else 1, 64)


def test_a_tokenizer_without_padding_stays_one(tmp_path):
    model = saved(tmp_path / "m", "llama", tokenizer=True)  # whose own tokenizer class has no padding
    with build_twin(settings("grpo", model), tmp_path / "a") as trainer:
        assert trainer.processing_class.pad_token == "<pad>"
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "pad_token"}))
    if (special := tmp_path / "m" / "special_tokens_map.json").exists():
        special.unlink()
    with build_twin(settings("grpo", model), tmp_path / "b") as trainer:
        assert trainer.processing_class.pad_token == "<eos>"  # TRL's own choice where there is none


def test_the_process_is_as_before(tmp_path):
    PartialState._shared_state["mine"] = 1
    try:
        before = dict(PartialState._shared_state), dict(AcceleratorState._shared_state), dict(os.environ)
        rng = torch.get_rng_state()
        with build_twin(settings("grpo", saved(tmp_path / "m"), "--seed", "7"), tmp_path):
            assert "mine" not in PartialState._shared_state
        assert before == (dict(PartialState._shared_state), dict(AcceleratorState._shared_state), dict(os.environ))
    finally:
        PartialState._shared_state.pop("mine")
    assert torch.equal(torch.get_rng_state(), rng) is False  # the user's own model was made in between
    rng = torch.get_rng_state()
    with build_twin(settings("grpo", str(tmp_path / "m"), "--seed", "7"), tmp_path / "again"):
        pass
    assert torch.equal(torch.get_rng_state(), rng)


def test_hardware_and_services_are_left_out(tmp_path):
    words = ["--use_vllm", "--optim", "adamw_bnb_8bit", "--deepspeed", "none.json", "--report_to", "wandb"]
    words += ["--attn_implementation", "flash_attention_2", "--load_in_4bit", "--use_peft", "--push_to_hub"]
    with build_twin(settings("grpo", saved(tmp_path / "m"), *words), tmp_path) as trainer:
        assert not trainer.use_vllm and trainer.args.report_to == [] and not trainer.args.push_to_hub


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda d: "Qwen/Qwen2-0.5B",
            "no local directory and not in the cache of models, and driftscope downloads nothing",
        ),
        (lambda d: str(d / "none"), "no local directory"),
        (lambda d: str(d), "no configuration that transformers can read"),
    ],
)
def test_a_model_that_cannot_be_read_is_told(make, said, tmp_path):
    with pytest.raises(UsageError, match=said), build_twin(settings("grpo", make(tmp_path)), tmp_path / "t"):
        pass


def test_an_encoder_decoder_is_no_text_decoder(tmp_path):
    T5Config(**ENCODER).save_pretrained(tmp_path / "m")
    with pytest.raises(UsageError, match="is no decoder of text alone"):  # noqa: SIM117
        with build_twin(settings("grpo", str(tmp_path / "m")), tmp_path):
            pass


def test_other_trainers_and_no_model(tmp_path):
    with pytest.raises(UsageError, match="only grpo and reward"):  # noqa: SIM117
        with build_twin(load_settings(None, ["trl", "sft"]), tmp_path):
            pass
    with pytest.raises(UsageError, match="no model is named"):  # noqa: SIM117
        with build_twin(load_settings(None, ["trl", "grpo"]), tmp_path):
            pass
