"""A diagnostic changes nothing: weights, gradients, logs and objects are what they are without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.callback import DriftscopeCallback
from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, steps_of, trainer

DROPOUT = {"attention_dropout": 0.2}
LIVE = [False, True] if HAS_LIGER_LOSS else [False]


def weights_after(
    tmp_path: Any, how: str, liger: bool, **overrides: Any
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    run_dir = tmp_path / how / "run"
    settings = {"spectrum_every": 1, "deep_every": 3, "console": False, "report": False}
    callbacks = [DriftscopeCallback(run_dir, **settings)] if how == "callback" else None
    with trainer(
        tmp_path / how, liger=liger, model_config=DROPOUT, callbacks=callbacks, max_steps=10, **overrides
    ) as made:
        scope = attach(made, run_dir, **settings) if how == "attach" else None
        made.train()
        if scope is not None:
            assert scope.guard.off == {}
            scope.detach()
        state = {name: value.clone() for name, value in made.model.state_dict().items()}
        rng = torch.get_rng_state()
    if how != "none":
        records = steps_of(run_dir)
        assert len({r.step for r in records}) == 10
        assert all(not r.unavailable for r in records)
    return state, rng


@pytest.mark.parametrize("liger", LIVE)
def test_weights_are_bit_identical(tmp_path: Any, liger: bool) -> None:
    bare, rng = weights_after(tmp_path, "none", liger)
    for how in ("attach", "callback"):
        watched, rng_watched = weights_after(tmp_path, how, liger)
        assert bare.keys() == watched.keys()
        for name, value in bare.items():
            assert torch.equal(value, watched[name]), (how, name)
        assert torch.equal(rng, rng_watched)


def test_dropout_is_on(tmp_path: Any) -> None:
    """The comparison above means something: with other dropout the weights differ."""
    some, _ = weights_after(tmp_path / "a", "none", False)
    with trainer(tmp_path / "b", model_config={"attention_dropout": 0.0}, max_steps=10) as made:
        made.train()
        none = made.model.state_dict()
    assert any(not torch.equal(value, none[name]) for name, value in some.items())


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}])
def test_bit_identical_under_checkpointing(tmp_path: Any, checkpointing: dict[str, Any]) -> None:
    extra = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": checkpointing}
    bare, _ = weights_after(tmp_path, "none", False, **extra)
    watched, _ = weights_after(tmp_path, "attach", False, **extra)
    assert all(torch.equal(value, watched[name]) for name, value in bare.items())


def test_detach_leaves_no_trace(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        inner = made.model.model
        before = (set(made.__dict__), set(made.accelerator.__dict__), list(made.callback_handler.callbacks))
        hooks = (len(inner._forward_hooks), len(inner._forward_pre_hooks))
        scope = attach(made, tmp_path / "run", console=False)
        assert set(made.__dict__) != before[0]
        scope.detach()
        after = (set(made.__dict__), set(made.accelerator.__dict__), list(made.callback_handler.callbacks))
        assert after == before
        assert (len(inner._forward_hooks), len(inner._forward_pre_hooks)) == hooks


def test_detach_gives_back_a_users_own_wrapper(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        own = made.compute_loss

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        made.compute_loss = wrapped
        with attach(made, tmp_path / "run", console=False):
            assert made.compute_loss is not wrapped
        assert made.compute_loss is wrapped


def test_the_users_logs_keep_their_figures(tmp_path: Any) -> None:
    logs = []
    for how in ("none", "attach"):
        with trainer(tmp_path / how) as made:
            scope = (
                attach(made, tmp_path / "run", spectrum_every=1, console=False, report=False)
                if how == "attach"
                else None
            )
            made.train()
            logs.append(made.state.log_history)
            if scope is not None:
                scope.detach()
    timing = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    for bare, watched in zip(*logs, strict=True):
        added = {k for k in watched if k.startswith("driftscope/")}
        assert {k: v for k, v in watched.items() if k not in added | timing} == {
            k: v for k, v in bare.items() if k not in timing
        }
    assert any("driftscope/gap/grad_norm_ratio" in entry for entry in logs[1])
