"""Settings against the installed TRL: its own parser, its own refusals, and nothing left behind."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
import random
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from driftscope.errors import UsageError
from driftscope.hooks.doctor.isolation import isolated
from driftscope.hooks.doctor.settings import ELSEWHERE, load_settings, logprobs_mode, settings_of
from tests.hooks import runs

YAML = """
model_name_or_path: some/model
learning_rate: 1e-6
top_p: 0.8
use_vllm: true
scale_rewards: false
num_generations: 4
per_device_train_batch_size: 4
gradient_checkpointing_kwargs: {use_reentrant: true}
lora_target_modules: all-linear
use_peft: true
env:
  SOME_NAME: value
"""
LINE = ["--temperature", "0.9", "--no_gradient_checkpointing", "--lora_r", "8", "--max-steps=7", "--bf16", "false"]


def state():
    shared = [dict(cls._shared_state) for cls in (PartialState, AcceleratorState, GradientState)]
    return shared, dict(os.environ), torch.get_rng_state().tolist(), random.getstate()


def test_the_same_values_as_trls_own_parser(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    settings = load_settings(path, ["trl", "grpo", *LINE])
    with isolated(keep_accelerate=False):
        parser = importlib.import_module("trl.scripts.grpo").make_parser()
        made = parser.parse_args_and_config(
            ["--config", str(path), "--output_dir", str(tmp_path / "x"), "--use_cpu", "--report_to", "none", *LINE]
        )
    wanted = {f.name: getattr(one, f.name) for one in made for f in dataclasses.fields(one) if f.init}
    left_alone = {*ELSEWHERE, "logging_dir", "datasets"}
    for name, value in wanted.items():
        if name not in left_alone and not dataclasses.is_dataclass(value):
            plain = value.value if isinstance(value, enum.Enum) else value
            assert settings.values[name] == plain, name
    assert settings.refusal is None
    assert (settings.trainer, settings.source) == ("grpo", f"{path} and command line")
    assert settings.given >= {"top_p", "temperature", "gradient_checkpointing", "lora_r"}
    assert "beta" not in settings.given and "env" not in settings.values


def test_settings_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    PartialState._shared_state["mine"] = 1
    try:
        before = state()
        load_settings(None, ["trl", "grpo", "--top_p", "0.8"])
        load_settings(None, ["trl", "reward", "--bf16", "--fp16"])
        assert state() == before
    finally:
        PartialState._shared_state.pop("mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        (["--center_rewards_coefficient", "0.01"], "reward"),
        (["--num_generations", "8"], "grpo"),
        (["--learning_rate", "1e-5"], "grpo"),
        (["trl", "reward"], "reward"),
    ],
)
def test_the_trainer_is_the_one_whose_settings_these_are(words, trainer):
    assert load_settings(None, words).trainer == trainer


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fp16", "--bf16"], "At most one of fp16 and bf16"),
        (["--load_in_4bit", "--load_in_8bit"], "8 bit and 4 bit"),
        (["--num_generations", "1"], "at least 2 generations"),
        (["--num_generations", "3", "--num_processes", "1"], "divisible by num_generations"),
        (["--steps_per_generation", "2", "--generation_batch_size", "16"], "can not be both configured"),
    ],
)
def test_what_trl_refuses_is_the_refusal(words, said):
    assert said in load_settings(None, ["trl", "grpo", *words]).refusal


def test_delta_with_liger_is_refused_where_this_trl_refuses_it(stack):
    refusal = load_settings(None, ["trl", "grpo", "--use_liger_kernel", "--delta", "2.0"]).refusal
    assert (refusal is not None) == (stack.name == "seed")


def test_the_number_of_processes_counts():
    words = ["trl", "grpo", "--per_device_train_batch_size", "1"]
    alone = load_settings(None, words)
    assert "accepts it with 8: give --num_processes 8" in alone.refusal
    many = load_settings(None, [*words, "--num_processes", "8"])
    assert (many.refusal, many.processes, many.values["generation_batch_size"]) == (None, 8, 8)
    assert load_settings(None, [*words, "--accelerate_config", "multi_gpu"]).processes == 8
    with pytest.raises(UsageError, match="neither a file nor a configuration"):
        load_settings(None, [*words, "--accelerate_config", "none_such"])


def test_resolved_values_are_filled_in():
    settings = load_settings(None, ["trl", "grpo", "--gradient_accumulation_steps", "4"])
    assert (settings.values["steps_per_generation"], settings.values["generation_batch_size"]) == (4, 32)
    assert settings.values["bf16"] is True and settings.values["use_cpu"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top_q", "1"], r"Did you mean --top_p\?"),
        (["--learning_rate", "fast"], "GRPOConfig.learning_rate takes a number"),
        (["trl", "gpo"], r"Did you mean grpo\?"),
        (["trl", "grpo", "--config", "missing.yaml"], "there is no such file"),
    ],
)
def test_bad_input_is_one_clear_message(words, said):
    with pytest.raises(UsageError, match=said):
        load_settings(None, words)


def test_an_unknown_trainer_by_name():
    with pytest.raises(UsageError, match="the installed TRL trains"):
        load_settings(None, [], trainer="ppo9")


def test_without_trl_the_message_says_what_to_install():
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "from driftscope.errors import UsageError\n"
        "from driftscope.hooks.doctor.settings import load_settings\n"
        "try:\n    load_settings(None, ['trl', 'grpo'])\nexcept UsageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "TRL is not installed here" in done.stdout and "pip install trl" in done.stdout


def test_this_trl_asks_the_engine_for_processed_log_probs():
    assert logprobs_mode() == "processed_logprobs"


def test_the_settings_of_a_live_trainer(tmp_path):
    with runs.trainer(tmp_path, top_p=0.8, use_bias_correction_kl=False, beta=0.1) as trainer:
        before = state()
        settings = settings_of(trainer)
        assert state() == before
    assert (settings.trainer, settings.values["top_p"], settings.values["use_peft"]) == ("grpo", 0.8, False)
    assert settings.values["dtype"] == "float32"
    assert {"top_p", "beta", "use_vllm", "bf16", "learning_rate"} <= settings.given
    resolved = {"steps_per_generation", "generation_batch_size", "report_to", "pad_to_multiple_of", "debug"}
    assert not settings.given & resolved


def test_a_trainer_of_the_users_own_class_is_known_by_its_base(tmp_path):
    class Mine(runs.GRPOTrainer):
        pass

    with runs.trainer(tmp_path, trainer_class=Mine) as trainer:
        assert settings_of(trainer).trainer == "grpo"
