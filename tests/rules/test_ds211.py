from __future__ import annotations

import math

import pytest

from driftscope.records import DriftRecord
from tests.canary_steps import found
from tests.record_factory import step


def seen(factor: float, kind: str = "shift", **fields):
    values = {"value": 0.0, "baseline": 0.0, "level": math.log(factor), "kind": kind, "state": "alarm", "fresh": True}
    return DriftRecord(**{**values, "started": 7, "score": 9.0, **fields})


@pytest.mark.parametrize(
    ("factor", "kind", "severity"),
    [(1.1, "shift", "warning"), (1.2, "trend", "warning"), (1.05, "bias", "warning"), (2.0, "spike", "info"),
     (10.0, "shift", "critical"), (0.05, "spike", "critical")],
)  # fmt: skip
def test_an_alarm_is_told_once_with_its_size(factor, kind, severity):
    alert = found(step(drift={"log_is_mean": seen(factor, kind)}), "DS211")
    assert alert.severity == severity
    assert "step 7" in alert.evidence
    assert kind in alert.evidence
    assert "mean importance sampling ratio" in alert.title


def test_an_open_episode_that_was_told_is_not_told_again():
    assert found(step(drift={"log_is_mean": seen(3.0, fresh=False)}), "DS211") is None
    assert found(step(drift={"log_is_mean": seen(3.0, level=None)}), "DS211") is None
    assert found(step(), "DS211") is None


def test_the_largest_of_several_gives_the_title():
    alert = found(step(drift={"log_is_mean": seen(1.2), "log_gap": seen(0.2)}), "DS211")
    assert alert.title.startswith("The gradient norm ratio")
    assert "log_is_mean" in alert.evidence


def test_the_critical_limit_is_a_setting():
    assert found(step(drift={"log_gap": seen(4.0)}), "DS211", gap_critical=3.0).severity == "critical"
