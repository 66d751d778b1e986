"""Full-parameter gradients of real trainers: exact, sketched, of two processes, and what the trainer accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from driftscope.hooks import deep as deep_module
from driftscope.hooks.gradients import Window
from driftscope.hooks.scope import attach
from driftscope.sketch import GradientSketch, Pair, SketchLayout, exact_pair, ratio
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, steps_of, trainer

LIVE = [False, True] if HAS_LIGER_LOSS else [False]
SETTINGS: dict[str, Any] = {"spectrum_every": 1, "deep_every": 1, "console": False, "report": False}
SKETCHED: dict[str, Any] = {**SETTINGS, "exact_gradient_bytes": 0}


def deep_records(tmp_path: Any, how: str, settings: dict[str, Any], **options: Any) -> list[Any]:
    """The last records of each window of a run."""
    with trainer(tmp_path / how, **options) as made:
        scope = attach(made, tmp_path / how / "run", **settings)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    return [r for r in steps_of(tmp_path / how / "run") if r.gradient is not None]


@contextmanager
def windows_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Window]]:
    """The exact gradients of each window, as they are when the record is filled."""
    kept: list[Window] = []
    real = deep_module.exact_found
    monkeypatch.setattr(deep_module, "exact_found", lambda window, *rest: kept.append(window) or real(window, *rest))
    yield kept


@pytest.mark.parametrize("liger", LIVE)
def test_the_sketch_says_what_the_exact_gradients_say(tmp_path: Any, liger: bool) -> None:
    exact = deep_records(tmp_path, "exact", SETTINGS, liger=liger, top_p=0.8)
    sketch = deep_records(tmp_path, "sketch", SKETCHED, liger=liger, top_p=0.8)
    assert [(r.step, r.micro_step) for r in exact] == [(r.step, r.micro_step) for r in sketch] == [(1, 1), (2, 1)]
    for a, b in zip(exact, sketch, strict=True):
        assert (a.gradient.method, a.gradient.size) == ("exact", None)
        assert (b.gradient.method, b.gradient.size) == ("sketch", 4096)
        assert (a.gradient.candidate, a.gradient.reference) == (b.gradient.candidate, b.gradient.reference)
        assert (a.gap.candidate, a.gap.reference) == (a.gradient.candidate, a.gradient.reference)
        for name in ("norm_ratio", "cosine", "difference", "accumulated"):
            true, found = getattr(a.gradient, name), getattr(b.gradient, name)
            assert true.error == 0
            assert abs(found.value - true.value) < 4 * found.error + 2e-7, name
            assert found.error < 0.02 * max(1.0, true.value), name
        for name, found in b.gradient.norms.items():
            true = a.gradient.norms[name]
            assert abs(found.value - true.value) < 4 * found.error + 1e-6 * true.value
            assert b.paths[name].param_grad_norm == found.value
        assert b.gap.param_grad_norm_ratio == b.gradient.norm_ratio.value
        assert b.gradient.norms[b.live].value == pytest.approx(b.live_grad_norm, rel=1e-5)  # what the trainer clips on
        assert b.gradient.norms[b.live].error < 1e-5 * b.live_grad_norm
        assert b.gradient.accumulated.value < 1e-6
        assert sum(m.share for m in a.gradient.modules) == pytest.approx(1.0)
        rows = {m.name: m for m in b.gradient.modules}
        for m in a.gradient.modules:
            assert rows[m.name].candidate == pytest.approx(m.candidate, rel=0.1), m.name
    assert "lm_head" in {m.name for m in exact[0].gradient.modules}


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss that drops the importance sampling ratio")
def test_the_norm_ratio_is_within_3_percent_over_200_hashes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """k=4096, a live Liger path without the importance sampling ratio against TRL's own: gradients of a real run."""
    with windows_kept(monkeypatch) as kept:
        records = deep_records(tmp_path, "exact", SETTINGS, liger=True, top_p=0.8)
    for window, record in zip(kept, records, strict=True):
        a, b = (window.paths[name].held.grads for name in ("liger", "reference"))
        numels = {name: grad.numel() for name, grad in a.items()}
        true = ratio(exact_pair(a.get, b.get, SketchLayout.of(numels, 4096))).value
        assert true > 3
        assert record.gradient.norm_ratio.value == pytest.approx(true)
        assert record.gradient.cosine.value < 0.9999 or record.step == 1
        off = []
        for seed in range(200):
            made = [GradientSketch(SketchLayout.of(numels, 4096, seed=seed)) for _ in range(2)]
            for sketch, grads in zip(made, (a, b), strict=True):
                for name, grad in grads.items():
                    sketch.add(name, grad)
            found = ratio(Pair.of(*made))
            off.append((abs(found.value / true - 1), abs(found.value - true) / max(found.error, 1e-9)))
        table = torch.tensor(off, dtype=torch.float64)
        assert float(table[:, 0].quantile(0.99)) < 0.03
        assert float((table[:, 1] < 2).double().mean()) > 0.9  # the error bar holds
    assert len(kept) == 2


def test_nothing_of_a_gradients_size_is_held_when_sketching(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a window is open, Driftscope holds its sketches and no gradient."""
    held: list[int] = []
    with trainer(tmp_path, max_steps=1) as made:
        scope = attach(made, tmp_path / "run", **SKETCHED, sketch_size=64)
        deep = scope.probe.deep
        real = deep.add

        def look(*args: Any, **kwargs: Any) -> None:
            during: list[int] = []
            parameters = list(deep.parameters().values())
            before = [p.grad for p in parameters]
            take = GradientSketch.add

            def taking(self: Any, name: str, grad: Any, **options: Any) -> None:
                during.append(sum(p.grad is not None for p in parameters))
                take(self, name, grad, **options)

            with monkeypatch.context() as patch:
                patch.setattr(GradientSketch, "add", taking)
                real(*args, **kwargs)
            assert max(during) == 0  # the one at hand is taken from its parameter before it is sketched
            assert len(during) >= 2 * len(parameters)  # two paths
            assert all(p.grad is g for p, g in zip(parameters, before, strict=True))
            paths = deep.windows.paths.values()
            held.append(sum(p.held.rows_RK.numel() for p in paths))

        monkeypatch.setattr(deep, "add", look)
        made.train()
        assert scope.guard.off == {}
        assert all(not p._post_accumulate_grad_hooks for p in deep.parameters().values())
        rows = len(deep.layout.rows)
        scope.detach()
    assert held == [2 * rows * 64] * 2


def weights(tmp_path: Any, how: str, settings: dict[str, Any] | None, **options: Any) -> dict[str, torch.Tensor]:
    with trainer(tmp_path / how, model_config={"attention_dropout": 0.2}, max_steps=4, **options) as made:
        scope = attach(made, tmp_path / how / "run", **settings) if settings is not None else None
        made.train()
        if scope is not None:
            assert scope.guard.off == {}
            scope.detach()
            assert all(r.gradient.accumulated is not None for r in steps_of(tmp_path / how / "run") if r.micro_step)
        return {name: value.clone() for name, value in made.model.state_dict().items()}


@pytest.mark.parametrize("liger", LIVE)
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_weights_are_bit_identical_when_sketching(tmp_path: Any, liger: bool, checkpointing: bool | None) -> None:
    options: dict[str, Any] = {"liger": liger}
    if checkpointing is not None:
        options |= {"gradient_checkpointing": True}
        options |= {"gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    bare, watched = weights(tmp_path, "none", None, **options), weights(tmp_path, "attach", SKETCHED, **options)
    assert all(torch.equal(value, watched[name]) for name, value in bare.items())


def test_lora_is_compared_exactly_by_default(tmp_path: Any) -> None:
    def wrap(model: Any) -> Any:
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    records = deep_records(tmp_path, "lora", SETTINGS, wrap=wrap)
    for record in records:
        assert record.gradient.method == "exact"
        assert all("lora_" in m.name for m in record.gradient.modules)
        assert record.paths[record.live].param_grad_norm == pytest.approx(record.live_grad_norm, rel=1e-5)
    sketched = deep_records(tmp_path, "sketched", SKETCHED, wrap=wrap)
    for a, b in zip(records, sketched, strict=True):
        # every adapter fits one block, so that nothing collides
        assert b.gradient.norm_ratio.error == 0.0
        assert b.gradient.norm_ratio.value == pytest.approx(a.gradient.norm_ratio.value, rel=1e-6)


def test_a_trained_head_over_a_frozen_trunk(tmp_path: Any) -> None:
    def wrap(model: Any) -> Any:
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("lm_head"))
        model.enable_input_require_grads()  # the hidden states still need a gradient
        return model

    for settings, how in ((SETTINGS, "exact"), (SKETCHED, "sketch")):
        for record in deep_records(tmp_path, how, settings, wrap=wrap):
            assert [m.name for m in record.gradient.modules] in ([], ["lm_head"])
            assert record.paths[record.live].param_grad_norm == pytest.approx(record.live_grad_norm, rel=1e-5)


def test_tied_embeddings_have_one_gradient(tmp_path: Any) -> None:
    for settings, how in ((SETTINGS, "exact"), (SKETCHED, "sketch")):
        for record in deep_records(tmp_path, how, settings, model_config={"tie_word_embeddings": True}):
            assert record.gradient.accumulated.value < 1e-6
            assert record.paths[record.live].param_grad_norm == pytest.approx(record.live_grad_norm, rel=1e-5)
            assert "lm_head" not in {m.name for m in record.gradient.modules}


def test_exact_up_to_the_limit_and_sketched_above(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        needed = 2 * 4 * sum(p.numel() for p in made.model.parameters() if p.requires_grad)
        for limit, exact in ((needed, True), (needed - 1, False), (0, False)):
            scope = attach(made, tmp_path / "run", exact_gradient_bytes=limit, console=False)
            assert scope.probe.deep.exact() is exact
            scope.detach()


def test_without_clipping_there_is_no_accumulated_gradient(tmp_path: Any) -> None:
    for record in deep_records(tmp_path, "sketch", SKETCHED, max_grad_norm=0.0):
        if record.live_grad_norm is None:  # transformers 5 asks for the norm all the same
            assert record.gradient.accumulated is None and record.gradient.bias is None
            norm = record.gradient.norms[record.live]
            assert 0 < norm.error < 0.02 * norm.value  # of the sketch alone


@pytest.mark.parametrize("settings", [SETTINGS, SKETCHED], ids=["exact", "sketch"])
def test_a_gradient_that_is_not_finite_is_named(tmp_path: Any, settings: dict[str, Any]) -> None:
    with trainer(tmp_path, max_steps=2) as made:
        step = made.training_step
        at: list[int] = []

        def spoilt(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            at.append(1)
            if len(at) == 4:  # the last micro-batch of the run: clipping spreads it over all weights
                made.model.lm_head.weight.grad[3, 5] = float("nan")
            return loss

        made.training_step = spoilt
        scope = attach(made, tmp_path / "run", **settings)
        made.train()
        assert scope.guard.off == {}
        bias = scope.probe.deep.bias
        assert (bias.steps, bias.skipped) == (1, 1) and torch.isfinite(bias.state()).all()
        scope.detach()
    first, second = [r for r in steps_of(tmp_path / "run") if r.gradient is not None]
    assert first.gradient.accumulated is not None and first.nonfinite == []
    assert "gradient.lm_head" in second.nonfinite
    assert second.gradient.accumulated is None and second.gradient.norm_ratio is None


def test_an_optimizer_in_the_backward_is_refused(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        handle = made.model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: None)
        scope = attach(made, tmp_path / "run", **SKETCHED)
        assert "inside the backward" in scope.probe.deep.refusal()
        made.train()
        scope.detach()
        handle.remove()
    for record in steps_of(tmp_path / "run"):
        assert "inside the backward" in " ".join(record.unavailable.values())
        assert record.gradient is None


@pytest.mark.parametrize("settings", [SETTINGS, SKETCHED], ids=["exact", "sketch"])
def test_a_micro_batch_that_failed_leaves_no_gradient_behind(
    tmp_path: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of which one micro-batch is missing says so, and is not taken for the whole."""
    with trainer(tmp_path, max_steps=2) as made:
        scope = attach(made, tmp_path / "run", **settings)
        deep = scope.probe.deep
        real, calls = deep.add, []

        def sometimes(*args: Any) -> None:
            calls.append(1)
            if len(calls) != 2:
                real(*args)

        monkeypatch.setattr(deep, "add", sometimes)
        made.train()
        assert deep.windows.paths == {}
        scope.detach()
    first, second = [r for r in steps_of(tmp_path / "run") if r.micro_step == 1]
    assert "every micro-batch" in first.unavailable["param_norm"] and first.gradient is None
    assert second.gradient is not None and "param_norm" not in second.unavailable


def biased_run(tmp_path: Any, how: str, change: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """20 deep steps whose accumulated gradient is changed after every micro-batch; its records and DS117s."""
    settings = {**SKETCHED, "deep_every": 1, "sketch_size": 1024}
    with trainer(tmp_path / how, max_steps=20, **options) as made:
        step = made.training_step

        def changed(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            with torch.no_grad():
                change(made.model)
            return loss

        made.training_step = changed
        scope = attach(made, tmp_path / how / "run", **settings)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    records = [r for r in steps_of(tmp_path / how / "run") if r.gradient is not None]
    return records, [a for a in alerts_of(tmp_path / how / "run") if a.rule == "DS117"]


def truncated(model: Any) -> None:
    """Sums in bfloat16 with the low bits cut off, as a conversion by a shift does it."""
    for p in model.parameters():
        p.grad.copy_((p.grad.view(torch.int32) & -65536).view(torch.float32))


def rounded(model: Any) -> None:
    """Sums in bfloat16 rounded to nearest: a larger dtype's honest neighbour."""
    for p in model.parameters():
        p.grad.copy_(p.grad.bfloat16())


def pushed(model: Any) -> None:
    """A small constant gradient of its own in one module, under 10% of noise everywhere."""
    whole = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    count = sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p) * (0.1 * whole / count**0.5))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.grad.add_(0.03 * whole / weight.numel() ** 0.5)


@pytest.mark.slow
def test_truncated_sums_are_found(tmp_path: Any) -> None:
    records, alerts = biased_run(tmp_path, "truncated", truncated)
    assert alerts and alerts[0].severity == "warning" and alerts[0].step >= 16
    assert "too short" in alerts[0].evidence
    last = records[-1].gradient
    assert last.bias.along.value < -1e-3
    assert last.accumulated.value < 0.01  # no single step's error shows it


@pytest.mark.slow
def test_a_bias_under_noise_is_found_and_its_module_named(tmp_path: Any) -> None:
    _, alerts = biased_run(tmp_path, "pushed", pushed)
    assert alerts
    assert "model.layers.1.mlp.up_proj" in alerts[-1].evidence


@pytest.mark.slow
def test_honest_rounding_is_not(tmp_path: Any) -> None:
    records, alerts = biased_run(tmp_path, "rounded", rounded)
    last = records[-1].gradient
    assert alerts == []
    assert last.bias.steps == 20 and 5e-4 < last.bias.noise < 1e-2
    assert abs(last.bias.along.value) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("liger", LIVE)
def test_a_run_in_bfloat16_is_not(tmp_path: Any, liger: bool) -> None:
    """Liger before 0.8 sums the head's chunk gradients in bfloat16, torch the micro-batches': here without a bias."""
    options = {"dtype": torch.bfloat16, "loss_type": "grpo", "vllm_importance_sampling_correction": False}
    records, alerts = biased_run(tmp_path, "bf16", lambda model: None, liger=liger, **options)
    last = records[-1].gradient
    assert alerts == []
    assert last.bias.steps == 20 and last.bias.noise > 1e-4
    assert abs(last.bias.along.value) < 2e-4
