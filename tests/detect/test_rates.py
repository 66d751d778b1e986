"""The numbers of benchmarks/results/detectors.json, on fewer runs and with fixed seeds: false alarms and lags."""

from __future__ import annotations

import math

import pytest

from driftscope.detect import Monitor
from driftscope.detect.simulate import noise, shifted
from driftscope.errors import UsageError
from tests.detect.series import alarms

STEPS, RUNS = 1500, 14  # 21,000 steps a noise: at 0.1 per 1000 two alarms are expected


@pytest.mark.parametrize(("kind", "limit"), [("white", 0.1), ("ar1_0.5", 1.0), ("ar1_0.8", 1.0)])
def test_false_alarms(kind, limit):
    count = sum(len(alarms(Monitor("x"), row)) for row in noise(kind, RUNS, STEPS, sd=0.3, seed=21).tolist())
    assert count <= limit * RUNS * STEPS / 1000


@pytest.mark.parametrize(
    ("factor", "sd", "kind", "within"),
    [
        (3.0, 0.05, "white", 10),
        (3.0, 0.05, "ar1_0.8", 10),
        (3.0, 0.3, "white", 10),
        (3.0, 0.3, "ar1_0.5", 10),
        (1.1, 0.02, "white", 100),
        (1.1, 0.02, "ar1_0.5", 100),
        (100.0, 0.3, "ar1_0.8", 1),
    ],
)
def test_lags(factor, sd, kind, within):
    runs, at = 20, 200
    rows = shifted(noise(kind, runs, at + within, sd=sd, seed=22), factor, at).tolist()
    found = [any(alarm.step > at for alarm in alarms(Monitor("x"), row)) for row in rows]
    assert sum(found) >= 0.9 * runs


def test_simulated_noise_is_what_it_says():
    for kind, phi in (("white", 0.0), ("ar1_0.5", 0.5), ("ar1_0.8", 0.8), ("student_t3", 0.0)):
        x = noise(kind, 200, 1000, sd=0.3, seed=5)
        assert x.std() == pytest.approx(0.3, rel=0.1)
        assert x[:, 0].std() == pytest.approx(0.3, rel=0.3)
        assert (x[:, 1:] * x[:, :-1]).mean() / x.var() == pytest.approx(phi, abs=0.03)
    assert shifted(x, 3.0, 10)[0, 10] - x[0, 10] == pytest.approx(math.log(3))
    with pytest.raises(UsageError, match="pink"):
        noise("pink", 1, 10, sd=1.0, seed=0)
