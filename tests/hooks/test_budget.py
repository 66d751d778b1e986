"""A budget that light steps alone use up is told once, in a real run."""

from __future__ import annotations

from typing import Any

import pytest

from driftscope.hooks.scope import attach
from tests.hooks.runs import notes_of, steps_of, trainer

STEPS = 40


@pytest.mark.parametrize(("budget", "told"), [(1e-9, True), (0.0, False)])
def test_light_steps_over_the_budget_are_told_once(tmp_path: Any, budget: float, told: bool) -> None:
    settings = {"spectrum_every": 5, "deep_every": 0, "max_overhead": budget, "console": False, "report": False}
    with trainer(tmp_path, max_steps=STEPS, gradient_accumulation_steps=1) as made:
        scope = attach(made, tmp_path / "run", **settings)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    notes = [note for note in notes_of(tmp_path / "run") if note.stage == "cadence"]
    assert len(notes) == told
    analysed = [r.step for r in steps_of(tmp_path / "run") if r.tier != "light"]
    if told:
        assert "max_overhead=1e-09" in notes[0].message
        assert max(analysed) < 30
    else:
        assert max(analysed) == 36
