"""A trainer whose internals were renamed: Driftscope refuses clearly or goes without a signal; the training goes on.

The trainer and its arguments are the real ones. One name at a time is hidden from Driftscope's own code and from it
alone, as if TRL had renamed it and its own code with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from driftscope.errors import UnsupportedTrainerError
from driftscope.hooks.adapters import NEEDED
from driftscope.hooks.callback import DriftscopeCallback
from driftscope.hooks.runinfo import SETTINGS
from driftscope.hooks.scope import attach
from tests.hooks.runs import notes_of, steps_of, trainer

PLAIN = {"__class__", "__dict__", "__mro__"}
TRAINED: dict[str, Any] = {"max_steps": 2, "top_p": 0.8, "model_config": {"attention_dropout": 0.2}}


def asked_by_driftscope() -> bool:
    """Whether the attribute is read by Driftscope itself."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name == "driftscope" or name.startswith("driftscope.")


@contextmanager
def watched(owner: Any, hidden: str | None, read: set[str]) -> Iterator[None]:
    """``owner`` answers Driftscope as if it had no attribute ``hidden``; what is read is added to ``read``."""
    base = type(owner)

    def answer(self: Any, name: str) -> Any:
        if name not in PLAIN and asked_by_driftscope():
            if name == hidden:
                raise AttributeError(f"{base.__name__!r} object has no attribute {name!r}")
            read.add(name)
        return base.__getattribute__(self, name)

    owner.__class__ = type(base.__name__, (base,), {"__getattribute__": answer, "__module__": base.__module__})
    try:
        yield
    finally:
        owner.__class__ = base


# What Driftscope reads of a trainer and of its arguments after it has attached; kept complete by the test below.
READ = (
    "_entropy_bonus_enabled", "_metrics", "_step", "beta", "compute_liger_loss", "current_gradient_accumulation_steps",
    "epsilon_high", "epsilon_low", "importance_sampling_level", "is_deepspeed_enabled", "liger_grpo_loss",
    "liger_loss", "llm", "loss_type", "max_completion_length", "min_p", "model_wrapped", "processing_class",
    "temperature", "top_k", "top_p", "use_liger_kernel", "vllm_generation", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
)  # fmt: skip
ARGS = (
    "delta", "gradient_accumulation_steps", "sapo_temperature_neg", "sapo_temperature_pos", "steps_per_generation",
    "use_bias_correction_kl", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> dict[str, torch.Tensor]:
    """Weights after two steps without Driftscope."""
    with trainer(tmp_path_factory.mktemp("plain"), **TRAINED) as made:
        made.train()
        return {n: v.clone() for n, v in made.model.state_dict().items()}


def test_the_lists_are_complete(tmp_path: Any) -> None:
    """Whatever Driftscope reads of the trainer is hidden by one of the tests below."""
    read: set[str] = set()
    of_args: set[str] = set()
    with trainer(tmp_path, **TRAINED) as made, watched(made, None, read), watched(made.args, None, of_args):
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False) as scope:
            made.train()
        assert scope.guard.off == {}
    assert len(read) > 20
    assert read - {*NEEDED, *READ} == set()
    assert of_args - {*ARGS, *SETTINGS} == set()


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_needed_is_asked_for_by_name(tmp_path: Any, name: str, plain: Any) -> None:
    with trainer(tmp_path, **TRAINED) as made, watched(made, name, set()):
        with pytest.raises(UnsupportedTrainerError, match=name):
            attach(made, tmp_path / "run")
        made.train()
        assert made.state.global_step == 2
        assert all(torch.equal(v, made.model.state_dict()[n]) for n, v in plain.items())


def run_without(owner: str, name: str, tmp_path: Any, plain: Any) -> None:
    with trainer(tmp_path, **TRAINED) as made:
        target = made if owner == "trainer" else made.args
        if not hasattr(target, name):
            pytest.skip(f"this TRL has no {name}")
        with watched(target, name, set()):
            try:
                scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False)
            except UnsupportedTrainerError as error:
                assert name in str(error)  # noqa: PT017 - either it is refused by its name, or the run is watched
                scope = None
            made.train()
            if scope is not None:
                scope.detach()
        assert made.state.global_step == 2
        assert all(torch.equal(v, made.model.state_dict()[n]) for n, v in plain.items())
        if scope is None:
            return
    off = scope.guard.off
    assert all(name in why for why in off.values())
    assert {note.stage for note in notes_of(tmp_path / "run")} == set(off)
    assert set(off) <= set(steps_of(tmp_path / "run")[-1].unavailable)


@pytest.mark.parametrize("name", READ)
def test_a_name_of_the_trainer_that_is_gone(tmp_path: Any, name: str, plain: Any) -> None:
    run_without("trainer", name, tmp_path, plain)


@pytest.mark.parametrize("name", ARGS)
def test_a_name_of_the_arguments_that_is_gone(tmp_path: Any, name: str, plain: Any) -> None:
    run_without("args", name, tmp_path, plain)


@pytest.mark.parametrize("name", ["_compute_loss", "model", "_metrics", "callback_handler", "state"])
def test_the_callback_on_such_a_trainer(tmp_path: Any, name: str, plain: Any) -> None:
    callback = DriftscopeCallback(tmp_path / "run", console=False)
    with trainer(tmp_path, callbacks=[callback], **TRAINED) as made, watched(made, name, set()):
        with pytest.warns(UserWarning, match="is not attached, the training goes on without it"):
            made.train()
        assert made.state.global_step == 2
        assert all(torch.equal(v, made.model.state_dict()[n]) for n, v in plain.items())
