"""Runs without any difference: no finding, a residual at rounding, and reported norms that agree; five seeds."""

from __future__ import annotations

from typing import Any

import pytest

from driftscope.cli import main
from driftscope.hooks.scope import attach
from driftscope.journal import read_run
from driftscope.verdict import judge
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, notes_of, steps_of, trainer

LIVE = [False, True] if HAS_LIGER_LOSS else [False]


@pytest.mark.parametrize("liger", LIVE)
@pytest.mark.parametrize("seed", range(5))
def test_no_finding(tmp_path: Any, seed: int, liger: bool) -> None:
    # grpo: Liger's normaliser is TRL's; sampling log-probs from an engine that truncates nothing
    with trainer(tmp_path, seed=seed, liger=liger, loss_type="grpo", max_steps=2) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=2, console=False)
        made.train()
        scope.detach()
    assert alerts_of(tmp_path / "run") == []
    assert notes_of(tmp_path / "run") == []
    records = steps_of(tmp_path / "run")
    assert len(records) == 4
    for record in records:
        assert not record.unavailable
        assert record.live == ("liger" if liger else "reference")
        assert record.residual < 1e-5
        assert record.paths[record.live].coef_error < 1e-5
        assert record.gap.grad_norm_ratio == pytest.approx(1.0, abs=1e-5)
        assert record.causes == []
        assert record.is_ratio.raw.mean == pytest.approx(1.0, abs=1e-4)
    deep = [r for r in records if r.paths[r.live].param_grad_norm is not None]
    assert [r.step for r in deep] == [1]
    assert deep[0].paths[deep[0].live].param_grad_norm == pytest.approx(deep[0].live_grad_norm, rel=1e-5)
    assert deep[0].gap.param_grad_norm_ratio == pytest.approx(1.0, abs=1e-5)
    assert (tmp_path / "run" / "report.html").stat().st_size > 1e6
    assert judge(read_run(tmp_path / "run")).level == "clean"
    assert main(["check", str(tmp_path / "run"), "--fail-on", "info"]) == 0
