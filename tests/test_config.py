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
    assert all(isinstance(v, (str, int, float, bool)) for v in settings.values())


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
