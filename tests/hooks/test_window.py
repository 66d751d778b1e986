"""Which micro-batches of a step are measured, and what a window knows of its times."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from driftscope.hooks.scope import attach
from driftscope.hooks.window import Window, measured_micro_steps
from tests.hooks.runs import steps_of, trainer


def test_light_steps_keep_the_last_and_deep_steps_all():
    assert measured_micro_steps(7, "light", 4, 1) == (3,)
    assert measured_micro_steps(7, "deep", 4, 1) == (0, 1, 2, 3)
    assert measured_micro_steps(7, "spectrum", 4, None) == (0, 1, 2, 3)
    assert measured_micro_steps(7, "spectrum", 4, 9) == (0, 1, 2, 3)
    assert measured_micro_steps(1, "spectrum", 1, 1) == (0,)


@pytest.mark.parametrize("every", [1, 2, 4, 16, 20, 80, 1000])
@pytest.mark.parametrize("accumulation", [2, 4, 8, 6])
def test_each_micro_batch_gets_its_turn_at_any_cadence(every: int, accumulation: int):
    chosen = [measured_micro_steps(1 + i * every, "spectrum", accumulation, 1) for i in range(2000)]
    counts = Counter(m for (m,) in chosen)
    assert set(counts) == set(range(accumulation))
    assert min(counts.values()) > 0.8 * 2000 / accumulation
    for micro_steps in (measured_micro_steps(step, "spectrum", accumulation, 2) for step in range(1, 50)):
        assert len(set(micro_steps)) == 2
        assert list(micro_steps) == sorted(micro_steps)


def test_forward_times_are_summed_and_unknown_without_spans():
    window = Window(1, "light", (0,))
    assert math.isnan(window.forward_ms())
    window.forward_spans += [(1.0, 1.5), (2.0, 2.25)]
    assert window.forward_ms() == pytest.approx(750.0)


def test_a_run_at_its_own_cadence_measures_one_micro_batch_in_turn(tmp_path: Path):
    settings = {"spectrum_every": 2, "deep_every": 8, "console": False, "report": False}
    with (
        trainer(tmp_path, max_steps=9, gradient_accumulation_steps=2) as made,
        attach(made, tmp_path / "run", **settings) as scope,
    ):
        made.train()
        assert scope.guard.off == {}
    records = steps_of(tmp_path / "run")
    tiers = {r.step: r.tier for r in records}
    assert tiers == {1: "deep", 2: "light", 3: "spectrum", 4: "light", 5: "spectrum", 6: "light", 7: "spectrum",
                     8: "light", 9: "deep"}  # fmt: skip
    assert Counter(r.step for r in records) == {1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 2}
    for record in records:
        assert (record.residual is not None) == (record.tier != "light")
        if record.tier == "spectrum":
            assert (record.micro_step,) == measured_micro_steps(record.step, "spectrum", 2, 1)
            assert record.live_grad_norm is not None
            assert record.cadence is not None
    assert records[-1].cadence.budget is None  # a cadence of one's own
    assert 0 < records[-1].cadence.spent < 1


def test_the_budget_stretches_the_default_cadence(tmp_path: Path):
    """On a tiny model a measured step costs more than the model's own: the second one is put off."""
    with (
        trainer(tmp_path, max_steps=24, gradient_accumulation_steps=1) as made,
        attach(made, tmp_path / "run", console=False, report=False) as scope,
    ):
        made.train()
        assert scope.guard.off == {}
    tiers = {r.step: r.tier for r in steps_of(tmp_path / "run")}
    assert tiers[1] == "deep"
    assert tiers[21] == "spectrum"  # taken on credit: its cost is not known yet
    assert {tiers[step] for step in range(2, 25) if step != 21} == {"light"}
    assert scope.cadence.record().spent > 0.02
