"""A tiny reward model learns a separable preference with ``reward_lora_config``, and not, or not for good, with what
the doctor flags. docs/reward-models.md has the numbers of more seeds.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.hooks.runs import IS_SEED_STACK, reset_accelerate

ROOT = Path(__file__).parents[2]
RELOADS = 5


def module():
    """benchmarks/reward_learning.py, which is no package."""
    name = "benchmark_reward_learning"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "reward_learning.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """name of a configuration -> what came of it, trained once."""
    made = {}

    def learn(name):
        if name not in made:
            reset_accelerate()
            made[name] = module().learn(name, tmp_path_factory.mktemp("learning"), reloads=RELOADS)
            reset_accelerate()
        return made[name]

    return learn


def learnt(result):
    return result.error is None and result.held_out > 0.95 and result.loss < 0.15


@pytest.mark.slow
def test_with_reward_lora_config_it_learns_and_stays_learnt(outcome):
    right = outcome("right")
    assert right.rules == ()
    assert learnt(right)
    assert right.reloaded == [right.held_out] * RELOADS
    assert max(right.reload_move) < 1e-4
    assert right.padding_move < 1e-4


@pytest.mark.slow
def test_without_a_task_type_it_is_lost_on_loading(outcome):
    result = outcome("no_task_type")
    assert result.rules == ("DS304", "DS305", "DS306")
    assert result.held_out > 0.95  # nothing shows while it trains
    assert result.loss > 3 * outcome("right").loss
    assert mean(result.reloaded) < 0.75
    assert min(result.reloaded) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule", "error"),
    [("causal_lm", "DS304", "prepare_inputs_for_generation"), ("no_module", "DS307", "No modules were targeted")],
)
def test_what_peft_refuses_is_predicted(name, rule, error, outcome):
    result = outcome(name)
    assert result.rules == (rule,)
    assert error in result.error
    assert result.train is None


@pytest.mark.slow
def test_a_language_model_does_not_learn_a_reward(outcome):
    result = outcome("causal_lm_model")
    assert result.rules == ("DS304", "DS308")
    assert result.held_out < 0.75
    assert result.loss > 5 * outcome("right").loss
    assert result.error is not None  # no reward model can load it


@pytest.mark.slow
def test_lora_on_the_head_is_not_the_same_model_after_loading(outcome):
    result = outcome("lora_on_head")
    assert result.rules == ("DS304", "DS305")
    assert result.held_out > 0.95
    assert min(result.reload_move) > 1e-3


@pytest.mark.slow
def test_a_frozen_head_bounds_the_reward(outcome):
    result = outcome("head_frozen")
    assert result.rules == ("DS306",)
    assert result.loss > 3 * outcome("right").loss
    assert max(result.reload_move) < 1e-4  # it is saved


@pytest.mark.slow
def test_an_adapter_outside_the_path_leaves_it_to_the_head(outcome):
    result = outcome("outside_path")
    assert result.rules == ("DS302", "DS307")
    assert result.held_out < 0.85
    assert result.loss > 3 * outcome("right").loss


@pytest.mark.slow
def test_two_labels_are_refused_or_do_not_load_as_a_reward(outcome):
    result = outcome("two_labels")
    assert result.rules == ("DS308",)
    if IS_SEED_STACK:
        assert result.held_out > 0.95  # it learns, twice
        assert "size mismatch" in result.error
    else:
        assert "num_labels=2" in result.error
        assert result.train is None


@pytest.mark.slow
def test_with_another_pad_token_the_reward_depends_on_the_batch(outcome):
    result = outcome("wrong_pad")
    assert result.rules == ("DS309",)
    assert result.padding_move > 0.05


@pytest.mark.slow
def test_with_a_pad_token_that_has_no_embedding_it_does_not_train(outcome):
    result = outcome("new_pad")
    assert result.rules == ("DS309",)
    assert "IndexError" in result.error


@pytest.mark.slow
def test_without_input_gradients_only_the_head_learns(outcome):
    result = outcome("no_input_grads")
    if not IS_SEED_STACK:  # transformers 5 enables them with checkpointing
        assert result.rules == ()
        assert learnt(result)
        return
    assert set(result.rules) == {"DS302", "DS303", "DS307"}
    assert result.held_out < 0.85
    assert result.loss > 3 * outcome("right").loss


def test_the_example_learns_and_loads(tmp_path, capsys):
    reset_accelerate()
    scores = runpy.run_path(str(ROOT / "examples" / "reward_lora.py"))["main"](str(tmp_path))
    reset_accelerate()
    assert scores["held out"] >= 0.95
    assert scores["saved and loaded"] == scores["held out"]
    assert "nothing found" in capsys.readouterr().out
