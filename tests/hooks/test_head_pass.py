"""The head pass of a real trainer: two products a tile, and none for a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.headpass import Heads
from driftscope.hooks.scope import attach
from driftscope.kernels import directions, gemms, passes
from tests.hooks.runs import steps_of, trainer


def run(directory: Any, **options: Any) -> list[Any]:
    """The step records of two steps, every micro-batch measured."""
    with trainer(directory, loss_type="grpo", **options) as made:
        scope = attach(made, directory / "run", spectrum_every=1, deep_every=0, console=False, report=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    return steps_of(directory / "run")


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "cohere"])
def test_a_spectrum_step_makes_two_products_a_tile(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    counted: list[str] = []

    def counting(module: Any, name: str) -> None:
        real = getattr(module, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counted.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, count)

    counting(passes, "raw_logits")
    counting(directions, "wide_product_")
    counting(gemms, "add_product_")
    monkeypatch.setattr(Heads, "_agrees", lambda *_: True)  # the check of the other fused way, once a run
    records = run(tmp_path, arch=arch)
    heads = 1 if arch == "qwen2" else 2
    assert counted == ["raw_logits", "wide_product_"] * (len(records) * heads)
    for record in records:
        assert record.residual < 1e-5
        assert record.paths["reference"].coef_error < 1e-5


def test_a_head_that_no_kernel_knows_goes_through_its_logits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the model's own head was taken for lm_head alone")

    monkeypatch.setattr(Heads, "_agrees", lambda *_: False)
    monkeypatch.setattr(directions, "wide_product_", fail)
    for record in run(tmp_path):
        assert record.residual < 1e-5


def test_the_directions_are_those_of_the_models_own_logits(tmp_path: Any) -> None:
    with trainer(tmp_path, arch="gemma2", model_config={"final_logit_softcapping": 3.0}) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, console=False, report=False)
        made.train()
        heads = scope.probe.heads
        head = heads.views["model"]
        assert head.directions is not None
        size = made.model.get_output_embeddings().weight.shape[1]
        hidden = torch.randn(7, size, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        targets = torch.arange(7)
        log_p = (head.logits(hidden) / float(made.temperature)).log_softmax(-1)
        (wanted,) = torch.autograd.grad(log_p.gather(-1, targets[:, None]).sum(), hidden)
        torch.testing.assert_close(head.directions(hidden, targets, False).u_ND, wanted, rtol=1e-4, atol=1e-6)
        scope.detach()
