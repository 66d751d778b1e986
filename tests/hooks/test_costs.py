"""The paths' real calls and their costs on deep steps: the corrected path is right, and everyone has a price."""

from __future__ import annotations

from typing import Any

import pytest

from driftscope.hooks import costs
from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, steps_of, trainer

SETTINGS: dict[str, Any] = {"spectrum_every": 1, "deep_every": 2, "console": False}


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "cohere"])
def test_the_corrected_path_is_right_where_the_live_one_is_not(tmp_path: Any, arch: str) -> None:
    with trainer(tmp_path, liger=HAS_LIGER_LOSS, arch=arch, top_p=0.8) as made:
        scope = attach(made, tmp_path / "run", **SETTINGS)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    deep = [r for r in steps_of(tmp_path / "run") if r.tier == "deep"]
    assert deep
    for record in deep:
        corrected, oracle = record.paths["corrected"], record.paths["oracle"]
        assert corrected.source == "fused_call"
        assert corrected.coef_error < 1e-5
        assert corrected.hidden_grad_norm == pytest.approx(oracle.hidden_grad_norm, rel=1e-5)
        assert corrected.loss == pytest.approx(oracle.loss, abs=1e-6)
        if HAS_LIGER_LOSS:
            assert record.paths["liger"].coef_error > 1.0
    first = next(r for r in deep if r.micro_step == 0)
    assert set(first.profile) == {"corrected", "liger", "reference"}
    assert all(cost.time_ms > 0 for cost in first.profile.values())
    assert all("GPU" in cost.note for cost in first.profile.values())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What each path costs" in page


def test_shallow_steps_have_no_profile(tmp_path: Any) -> None:
    with trainer(tmp_path, max_steps=2) as made, attach(made, tmp_path / "run", **SETTINGS):
        made.train()
    assert all(not r.profile for r in steps_of(tmp_path / "run") if r.tier != "deep")


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="TRL 1.14 on never holds the full logits")
def test_logits_that_are_too_large_are_not_made(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_CPU_BYTES", 1000)
    with trainer(tmp_path, max_steps=1) as made, attach(made, tmp_path / "run", **SETTINGS):
        made.train()
    cost = next(r for r in steps_of(tmp_path / "run") if r.profile).profile["reference"]
    assert cost.time_ms is None
    assert "GiB" in cost.note
