"""On a GPU: the same promises in the dtypes that run there, with peak memory in the profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, steps_of, trainer

pytestmark = [
    pytest.mark.gpu,
    # torch says once a process that one of its attention kernels may choose another order; the run below chooses none.
    pytest.mark.filterwarnings("ignore:cuDNN Attention defaults to a non-deterministic:UserWarning"),
]
SETTINGS: dict[str, Any] = {"spectrum_every": 1, "deep_every": 2, "console": False, "report": False}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 autocast": {"bf16": True},
    "bf16": {"bf16": True, "dtype": torch.bfloat16},
    "fp16 scaled": {"fp16": True},
}
RESIDUAL = {"fp32": 1e-3, "bf16 autocast": 2e-2, "bf16": 2e-2, "fp16 scaled": 5e-3}  # fp32: TF32 may be on


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("liger", [False, True] if HAS_LIGER_LOSS else [False])
def test_an_honest_run(tmp_path: Any, dtype: str, liger: bool) -> None:
    options = {"loss_type": "grpo", "vllm_importance_sampling_correction": False, "use_cpu": False, "max_steps": 3}
    with trainer(tmp_path, liger=liger, **options, **DTYPES[dtype]) as made:
        assert next(made.model.parameters()).is_cuda
        scope = attach(made, tmp_path / "run", **SETTINGS)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    records = steps_of(tmp_path / "run")
    assert len(records) == 6
    for record in records:
        assert record.residual < RESIDUAL[dtype]
        assert record.gap.grad_norm_ratio == pytest.approx(1.0, abs=0.05)
        assert record.causes == []
    deep = [r for r in records if r.profile]
    assert deep
    assert all(cost.peak_bytes > 0 for cost in deep[0].profile.values())
    last = [r for r in records if r.paths[r.live].param_grad_norm is not None]
    assert last
    for record in last:
        assert record.paths[record.live].param_grad_norm == pytest.approx(record.live_grad_norm, rel=0.02)
    assert not [a for a in alerts_of(tmp_path / "run") if a.severity != "info"]


def test_weights_are_bit_identical(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        states = []
        for how in ("none", "attach"):
            options = {"model_config": {"attention_dropout": 0.2}, "use_cpu": False, "bf16": True, "max_steps": 6}
            with trainer(tmp_path / how, **options) as made:
                scope = attach(made, tmp_path / "run", **SETTINGS) if how == "attach" else None
                made.train()
                if scope is not None:
                    assert scope.guard.off == {}
                    scope.detach()
                states.append({n: v.clone() for n, v in made.model.state_dict().items()})
        assert all(torch.equal(v, states[1][n]) for n, v in states[0].items())
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_correct_mode(tmp_path: Any) -> None:
    with trainer(tmp_path, liger=HAS_LIGER_LOSS, use_cpu=False, bf16=True, max_steps=3) as made:
        scope = attach(made, tmp_path / "run", mode="correct", **SETTINGS)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    for record in steps_of(tmp_path / "run"):
        assert record.live == "corrected"
        assert record.paths["corrected"].coef_error < 0.03
        assert record.causes == []
