"""The canary in real trainers with the stand-in engine: a fault is named within two steps, honest runs are quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from driftscope.hooks import sampler
from driftscope.hooks.scope import attach
from driftscope.hooks.weights import Snapshot, blocks, modules
from tests.hooks import runs
from tests.hooks.runs import alerts_of, steps_of, trainer

RULES = {"DS207", "DS208", "DS209", "DS210"}


@contextmanager
def engine(**settings: Any) -> Iterator[None]:
    """Runs inside are built with this engine."""
    original = runs.stand_in_engine
    runs.stand_in_engine = lambda seed: sampler.stand_in_engine(seed=seed, **settings)  # type: ignore[assignment]
    try:
        yield
    finally:
        runs.stand_in_engine = original


def run(tmp_path: Any, *, steps: int = 3, **overrides: Any) -> tuple[list[Any], set[str]]:
    """The looks of a run, and the rules that fired."""
    with trainer(tmp_path, max_steps=steps, gradient_accumulation_steps=1, **overrides) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False)
        made.train()
        scope.detach()
    records = [r for r in steps_of(tmp_path / "run") if r.canary is not None]
    assert len(records) == steps
    assert not any("canary" in r.unavailable for r in records)
    return records, {a.rule for a in alerts_of(tmp_path / "run")}


@pytest.mark.parametrize("seed", range(5))
def test_an_honest_run_agrees_with_the_current_weights(tmp_path: Any, seed: int):
    records, rules = run(tmp_path, seed=seed)
    assert {r.canary.agrees_with for r in records} == {"current"}
    assert all([c.id for c in r.is_ratio.causes] == ["engine_noise"] for r in records)
    assert all(r.canary.rms < 10 * r.canary.noise_floor for r in records)
    assert not rules & RULES


def test_a_lost_weight_sync_is_named_at_the_second_step(tmp_path: Any):
    with engine(stale=True):
        records, rules = run(tmp_path)
    assert [r.canary.agrees_with for r in records] == ["current", "previous", "previous"]
    assert all(r.is_ratio.causes[0].id == "stale_weights" for r in records[1:])
    assert all(r.is_ratio.causes[0].share == pytest.approx(1.0, abs=1e-3) for r in records[1:])
    assert rules & RULES == {"DS207"}


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.1", ["model.layers.1"]),
        ("model.layers.0.mlp.down_proj", ["model.layers.0.mlp.down_proj"]),
    ],
)
def test_a_stale_part_is_named_by_its_module(tmp_path: Any, lost: str, named: list[str]):
    with engine(stale=[lost]):
        records, rules = run(tmp_path)
    for record in records[1:]:
        assert record.canary.agrees_with == "part"
        assert record.is_ratio.causes[0].id == "stale_module"
        assert all(m.startswith(lost) for m in record.canary.stale_modules), record.canary.stale_modules
    if lost != "model.layers.1":
        assert records[1].canary.stale_modules == named
    assert rules & RULES == {"DS208"}


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    )


def test_an_adapter_that_the_engine_never_loaded_is_named(tmp_path: Any):
    with engine(stale=True):
        records, rules = run(tmp_path, wrap=with_lora, learning_rate=1e-2)
    assert records[1].canary.agrees_with == "adapter_off"
    assert records[1].is_ratio.causes[0].id == "adapter_missing"
    assert rules & RULES == {"DS209"}


def test_an_adapter_that_is_synced_is_not(tmp_path: Any):
    records, rules = run(tmp_path, wrap=with_lora, learning_rate=1e-2)
    assert {r.canary.agrees_with for r in records} == {"current"}
    assert records[-1].canary.distances["current"] < 1e-5
    assert not rules & RULES


def test_another_temperature_is_named(tmp_path: Any):
    with trainer(tmp_path, max_steps=2, gradient_accumulation_steps=1) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False)
        if hasattr(made, "vllm_generation"):
            made.vllm_generation.temperature = 0.7
        else:
            generate = made._generate_single_turn

            def at_its_own(*args: Any, **kwargs: Any) -> Any:
                made.temperature = 0.7
                try:
                    return generate(*args, **kwargs)
                finally:
                    made.temperature = 1.0

            made._generate_single_turn = at_its_own
        made.train()
        scope.detach()
    records = steps_of(tmp_path / "run")
    for record in records:
        assert record.is_ratio.causes[0].id == "temperature"
        assert "temperature 0.7," in record.is_ratio.causes[0].detail
        assert record.is_ratio.causes[0].share == pytest.approx(1.0, abs=0.01)
    assert "DS210" in {a.rule for a in alerts_of(tmp_path / "run")}


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_the_kept_mass_explains_truncated_sampling(tmp_path: Any, mode: str):
    records, rules = run(tmp_path, top_p=0.8, vllm_importance_sampling_mode=mode)
    for record in records:
        assert record.is_ratio.causes[0].id == "truncated_support"
        assert record.is_ratio.causes[0].share == pytest.approx(1.0, abs=0.01)
        assert record.is_ratio.truncated_support_share == pytest.approx(1.0, abs=0.01)
        assert record.canary.agrees_with == "current"
        assert ("sequence_product" in {c.id for c in record.is_ratio.causes}) == (mode == "sequence_mask")
    assert not rules & RULES


def test_a_coarser_engine_is_noise_and_said_so(tmp_path: Any):
    with engine(dtype=torch.bfloat16):
        records, rules = run(tmp_path)
    for record in records:
        assert record.canary.agrees_with == "current"
        assert record.is_ratio.causes[0].id == "engine_noise"
        assert "coarser number format" in record.is_ratio.causes[0].detail
    assert not rules & RULES


def test_a_model_that_is_too_large_is_not_copied(tmp_path: Any):
    with (
        engine(stale=True),
        trainer(tmp_path, max_steps=2, gradient_accumulation_steps=1) as made,
        attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False, canary_bytes=1000),
    ):
        made.train()
    last = steps_of(tmp_path / "run")[-1]
    assert "previous" not in last.canary.distances
    assert "canary_bytes" in last.canary.note


def test_the_snapshot_is_put_in_place_and_taken_back(tmp_path: Any):
    from driftscope.hooks.tiny import tiny_model

    model = tiny_model(tie_word_embeddings=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    kept = Snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    with kept.in_place():
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(torch.equal(p, after[n]) for n, p in model.named_parameters())
    with kept.in_place(["model.norm.weight"]):
        changed = [n for n, p in model.named_parameters() if not torch.equal(p, after[n])]
    assert changed == ["model.norm.weight"]
    with pytest.raises(RuntimeError, match="on purpose"), kept.in_place():
        raise RuntimeError("on purpose")
    assert all(torch.equal(p, after[n]) for n, p in model.named_parameters())


def test_parameters_fall_into_blocks_and_modules():
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up.weight",
        "model.layers.0.mlp.up.bias",
        "lm_head.weight",
    ]
    assert set(blocks(names)) == {"model.embed_tokens", "model.layers.0", "lm_head"}
    assert set(modules(names)) == {"model.embed_tokens", "model.layers.0.mlp.up", "lm_head"}


def test_a_tokenizer_that_differs_is_told_once_it_is_asked(tmp_path: Any):
    with trainer(tmp_path, max_steps=1, gradient_accumulation_steps=1) as made:
        engine = getattr(made, "llm", None) or made.vllm_generation.llm
        engine.tokenizer.eos_token = "w7"
        engine.tokenizer.add_tokens(["w3 w14"])
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False):
            made.train()
    (look,) = [r.canary for r in steps_of(tmp_path / "run") if r.canary is not None]
    assert [words.partition(":")[0] for words in look.tokenizer][:2] == ["vocabulary", "end of sequence"]
    assert "DS213" in {a.rule for a in alerts_of(tmp_path / "run")}
    records, rules = run(tmp_path / "honest")
    assert [r.canary.tokenizer for r in records] == [[]] * len(records)
    assert "DS213" not in rules


def test_a_profile_of_ones_own_judges_the_run(tmp_path: Any):
    profile = tmp_path / "mine.json"
    profile.write_text('{"base": "verl", "name": "mine", "ratio_mean_low": 0.9}', encoding="utf-8")
    for name, top_p, settings in (("own", 0.85, {"profile": str(profile)}), ("verl", 0.85, {}), ("off", 1.0, {})):
        with trainer(tmp_path / name, max_steps=1, gradient_accumulation_steps=1, top_p=top_p,
                     vllm_importance_sampling_mode="token_truncate") as made, attach(
            made, tmp_path / name / "run", spectrum_every=1, deep_every=0, console=False, report=False, **settings
        ):  # fmt: skip
            made.train()
        (record,) = [r for r in steps_of(tmp_path / name / "run") if r.mismatch is not None]
        limits = [v.limit for v in record.violations]
        assert ("ratio_mean_low" in limits) == (name == "own"), (name, limits)


def test_a_mismatch_over_the_profiles_limit_is_told(tmp_path: Any):
    profile = tmp_path / "mine.json"
    profile.write_text('{"base": "verl", "name": "mine", "ratio_std_high": 0.01}', encoding="utf-8")
    for stale in (True, False):
        folder = tmp_path / str(stale)
        with (
            engine(stale=stale),
            trainer(folder, max_steps=2, gradient_accumulation_steps=1) as made,
            attach(
                made, folder / "run", spectrum_every=1, deep_every=0, console=False, report=False, profile=str(profile)
            ),
        ):
            made.train()
        assert ("DS212" in {a.rule for a in alerts_of(folder / "run")}) == stale


def test_old_weights_are_told_beside_truncated_sampling(tmp_path: Any):
    """The kept mass is that of the current weights, so a little is left: no stale module, and no number format."""
    with engine(stale=True):
        records, rules = run(tmp_path, steps=6, top_p=0.8)
    for record in records[1:]:
        assert {c.id for c in record.is_ratio.causes[:2]} == {"truncated_support", "stale_weights"}
        assert record.canary.agrees_with == "previous"
        assert not any("coarser" in (c.detail or "") for c in record.is_ratio.causes)
    assert rules & RULES == {"DS207"}


def test_the_figures_go_to_the_trainers_own_log(tmp_path: Any):
    with trainer(tmp_path, max_steps=2, gradient_accumulation_steps=1) as made:
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False):
            made.train()
        logged = set().union(*made.state.log_history)
    for name in ("mismatch/k3", "mismatch/logp_abs_diff", "canary/rms", "canary/noise_floor", "is_ratio/raw_mean"):
        assert f"driftscope/{name}" in logged
