"""What a fused path that reads lm_head.weight leaves out: measured on the model, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.head import causal_lm, measure_transform, model_head, raw_head
from driftscope.hooks.scope import attach
from driftscope.hooks.tiny import tiny_model
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, steps_of, trainer

needs_liger_loss = pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss")


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    out = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in out.named_parameters():
        if "lora_B" in name and "lm_head" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return out


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "softcap": ({"arch": "gemma2"}, "logit_transform", "DS107"),
    "scale": ({"arch": "cohere"}, "logit_transform", "DS107"),
    "adapter": ({"wrap": adapted, "use_vllm": False}, "head_adapter", "DS108"),
}


@needs_liger_loss
@pytest.mark.parametrize("case", CASES)
def test_the_fused_path_drops_it(tmp_path: Any, case: str) -> None:
    options, cause, rule = CASES[case]
    with trainer(tmp_path, liger=True, loss_type="grpo", **options) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False, report=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    for record in steps_of(tmp_path / "run"):
        assert record.causes[0].id == cause
        assert record.residual < 1e-5  # in the directions of the head that the live path used
        assert record.unexplained.share < 0.01
        assert record.paths["liger"].coef_error > 0.01
    assert rule in {a.rule for a in alerts_of(tmp_path / "run")}


@pytest.mark.parametrize("arch", ["gemma2", "cohere", "qwen2"])
def test_the_reference_does_not(tmp_path: Any, arch: str) -> None:
    with trainer(tmp_path, arch=arch, loss_type="grpo") as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False, report=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    for record in steps_of(tmp_path / "run"):
        assert record.residual < 1e-5
        assert record.paths["reference"].coef_error < 1e-5
    assert not [a for a in alerts_of(tmp_path / "run") if a.severity != "info"]


@pytest.mark.parametrize(
    ("arch", "config", "softcap", "scale"),
    [
        ("qwen2", {}, None, 1.0),
        ("gemma2", {"final_logit_softcapping": 3.0}, 3.0, 1.0),
        ("cohere", {"logit_scale": 0.25}, None, 0.25),
    ],
)
def test_measured_transform(arch: Any, config: dict[str, Any], softcap: float | None, scale: float) -> None:
    from contextlib import nullcontext

    model = tiny_model(arch, 0, **config)
    inner = causal_lm(model)
    hidden = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = measure_transform(
        inner, model_head(inner, nullcontext), raw_head(inner, nullcontext), hidden, torch.float32
    )
    assert found.softcap == softcap
    assert found.scale == pytest.approx(scale, rel=1e-5)
    assert found.plain == (arch == "qwen2")
    assert not found.adapter
    assert not found.other
    assert type(inner.model).__name__ != "_Answer"
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
