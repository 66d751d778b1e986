"""Settings and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftscope.config import DriftscopeConfig
from driftscope.errors import UsageError
from driftscope.schedule import due, tier


def test_schedule():
    assert [s for s in range(1, 22) if due(s, 10)] == [1, 11, 21]
    assert not any(due(s, 0) for s in range(1, 5))
    assert [tier(s, spectrum_every=2, deep_every=4) for s in range(1, 6)] == [
        "deep",
        "light",
        "spectrum",
        "light",
        "deep",
    ]


def test_defaults_are_plain_json():
    settings = DriftscopeConfig(run_dir=Path("runs") / "x").as_dict()
    assert settings["run_dir"] == str(Path("runs") / "x")
    left_open = {"max_overhead", "spectrum_micro_batches"}
    assert {name for name, v in settings.items() if v is None} == left_open
    assert all(isinstance(v, (str, int, float, bool)) for name, v in settings.items() if name not in left_open)


def test_the_budget_is_for_the_default_cadence():
    assert DriftscopeConfig().budget == 0.02
    assert DriftscopeConfig(spectrum_every=5).budget == 0.0  # what was asked for is measured
    assert DriftscopeConfig(spectrum_every=5, max_overhead=0.01).budget == 0.01
    assert DriftscopeConfig(max_overhead=0).budget == 0.0


def test_spectrum_steps_measure_one_micro_batch_unless_every_step_is_measured():
    assert DriftscopeConfig().micro_batches == 1
    assert DriftscopeConfig(spectrum_every=1).micro_batches is None
    assert DriftscopeConfig(spectrum_every=1, spectrum_micro_batches=2).micro_batches == 2
    with pytest.raises(UsageError, match="spectrum_micro_batches"):
        DriftscopeConfig(spectrum_micro_batches=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spectrum_every", -1),
        ("deep_every", -1),
        ("gap_warning", 1.0),
        ("gap_critical", 1.1),
        ("on_divergence", "panic"),
        ("workspace_bytes", 0),
        ("scatter_points", -3),
    ],
)
def test_values_out_of_their_domain(name, value):
    with pytest.raises(UsageError, match=name):
        DriftscopeConfig(**{name: value})
