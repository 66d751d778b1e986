"""Findings beyond dropped terms, each in a real run that has the fault: extra terms, norms that disagree, references
that are off, an engine that goes stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.scope import attach
from driftscope.journal import read_run
from driftscope.verdict import judge
from tests.hooks.runs import IS_SEED_STACK, alerts_of, steps_of, trainer

SETTINGS: dict[str, Any] = {"spectrum_every": 1, "deep_every": 1, "console": False, "report": False}


def watched(made: Any, run_dir: Any) -> dict[str, Any]:
    scope = attach(made, run_dir, **SETTINGS)
    made.train()
    assert scope.guard.off == {}
    scope.detach()
    return {a.rule: a for a in alerts_of(run_dir)}


def test_a_loss_term_on_the_hidden_states(tmp_path: Any) -> None:
    """A term that reaches the trunk through the hidden states is in no token coefficient: it is residual."""
    with trainer(tmp_path, loss_type="grpo") as made:
        own, seen = made.compute_loss, []
        made.model.model.register_forward_hook(lambda *a: seen.append(a[2].last_hidden_state))

        def with_extra(model: Any, inputs: Any, **kwargs: Any) -> Any:
            seen.clear()
            loss = own(model, inputs, **kwargs)
            return loss + 1e-3 * seen[-1].square().sum(-1).mean()

        made.compute_loss = with_extra
        found = watched(made, tmp_path / "run")
    assert found["DS109"].severity != "info"
    assert all(r.residual > 1e-3 for r in steps_of(tmp_path / "run"))
    assert judge(read_run(tmp_path / "run")).level in ("warning", "critical")


def test_a_loss_term_on_the_weights(tmp_path: Any) -> None:
    """A term that bypasses the hidden states shows in the norm that the trainer clips on, and nowhere else."""
    with trainer(tmp_path, loss_type="grpo") as made:
        own = made.compute_loss

        def decayed(model: Any, inputs: Any, **kwargs: Any) -> Any:
            return own(model, inputs, **kwargs) + 0.05 * model.model.embed_tokens.weight.square().sum()

        made.compute_loss = decayed
        found = watched(made, tmp_path / "run")
    assert found["DS110"].severity != "info"
    records = steps_of(tmp_path / "run")
    assert all(r.residual < 1e-5 for r in records)
    last = [r for r in records if r.live_grad_norm is not None]
    assert all(r.paths["reference"].param_grad_norm < 0.9 * r.live_grad_norm for r in last)


@pytest.mark.skipif(not IS_SEED_STACK, reason="TRL 1.10 on rescales the normaliser")
@pytest.mark.parametrize("liger", [False, True])
def test_the_reference_itself_is_off(tmp_path: Any, liger: bool) -> None:
    """Twice as many steps per generation as accumulated: TRL 0.27's own DAPO normaliser is twice too large."""
    with trainer(tmp_path, liger=liger, steps_per_generation=4, learning_rate=0.0) as made:
        found = watched(made, tmp_path / "run")
    records = steps_of(tmp_path / "run")
    for record in records:
        assert record.paths["reference"].coef_error == pytest.approx(0.5, abs=1e-3)
        assert record.causes[0].id == "normalizer"
        if liger:  # the fused path is the right one here
            assert record.paths["liger"].coef_error < 1e-3
            assert record.causes[0].factor == pytest.approx(2.0, rel=0.01)
        else:
            assert record.gap.reference == "oracle"
            assert record.causes[0].factor == pytest.approx(0.5, rel=0.01)
    assert found["DS112"].severity != "info"
    verdict = judge(read_run(tmp_path / "run"))
    assert verdict.level in ("warning", "critical")


def test_an_engine_that_goes_stale(tmp_path: Any) -> None:
    """The ratio drifts although nothing is truncated: the canary names the weights, and no other cause is made up."""
    from driftscope.hooks import sampler

    with trainer(tmp_path, learning_rate=3e-2, max_steps=4, max_completion_length=24) as made:
        engines = [o for o in vars(made).values() if isinstance(o, sampler.StandInLLM)]
        generation = getattr(made, "vllm_generation", None)
        engine = engines[0] if engines else generation.llm
        object.__setattr__(engine.model.settings, "stale", True)
        found = watched(made, tmp_path / "run")
    assert "DS202" in found
    assert "DS201" not in found
    assert "DS207" in found
    for record in steps_of(tmp_path / "run"):
        assert record.is_ratio.kept_mass is None
        named = {c.id for c in record.is_ratio.causes}
        looked = record.canary is not None
        assert named == (set() if not looked else {"engine_noise"} | ({"stale_weights"} if record.step > 1 else set()))


def test_fewer_tokens_than_the_tile(tmp_path: Any) -> None:
    """A workspace of a single row gives the same figures as a large one."""
    norms = []
    for name, size in (("small", 1), ("large", 2**30)):
        run_dir = tmp_path / name / "run"
        with trainer(tmp_path / name, max_steps=1) as made, attach(made, run_dir, **SETTINGS, workspace_bytes=size):
            made.train()
        norms.append([r.paths["oracle"].hidden_grad_norm for r in steps_of(tmp_path / name / "run")])
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-6, atol=0)


def test_a_cap_under_every_ratio_masks_all_of_them(tmp_path: Any) -> None:
    from dataclasses import fields

    from trl import GRPOConfig

    names = {f.name for f in fields(GRPOConfig)}
    cap = next(n for n in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap") if n in names)
    for limit, fires in ((0.5, True), (3.0, False)):
        folder = tmp_path / str(limit)
        with trainer(folder, max_steps=1, vllm_importance_sampling_mode="sequence_mask", **{cap: limit}) as made:
            assert ("DS203" in watched(made, folder / "run")) == fires
