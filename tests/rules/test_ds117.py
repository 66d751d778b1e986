from __future__ import annotations

import pytest

from driftscope.records import BiasRecord, Estimate, GradientRecord
from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step

FOUND = {"size": (0.01, 4e-4), "score": 90.0, "along": (1e-5, 1e-5)}


def found(record):
    return next((a for a in evaluate(record, Thresholds()) if a.rule == "DS117"), None)


def deep(*, steps=50, size=(0.0, 1e-4), score=0.1, along=(0.0, 1e-5), module="model.layers.3.mlp.up_proj", noise=4e-7):
    bias = BiasRecord(
        steps=steps, size=Estimate(value=size[0], error=size[1]), noise=0.1, score=score, module=module,
        along=Estimate(value=along[0], error=along[1]), along_module="lm_head",
    )  # fmt: skip
    return step(noise=noise, gradient=GradientRecord(method="sketch", size=4096, bias=bias))


def test_a_significant_bias_fires_and_names_the_module():
    finding = found(deep(**FOUND))
    assert finding.severity == "warning"
    assert "0.0100" in finding.evidence and "50 deep steps" in finding.evidence
    assert "model.layers.3.mlp.up_proj" in finding.evidence and "lm_head" not in finding.evidence


def test_a_gradient_that_is_too_short_fires_and_names_the_module():
    finding = found(deep(along=(-0.0027, 1e-5)))
    assert "0.3% too short" in finding.evidence and "lm_head" in finding.evidence
    assert "too long" in found(deep(along=(0.0027, 1e-5))).evidence


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 15},  # too early
        {"score": 19.0},  # may be noise
        {"score": None},
        {"size": (0.01, 0.002)},  # may be nothing
        {"size": (9e-4, 1e-5)},  # too small to matter
        {"noise": 0.02},  # within one rounding of this dtype
        {"noise": float("nan"), "size": (0.003, 1e-5)},  # noise not measured: bf16's is assumed
    ],
)
def test_what_may_be_noise_does_not(changed):
    assert found(deep(**{**FOUND, **changed})) is None


def test_a_short_gradient_within_its_error_does_not():
    assert found(deep(along=(-0.0027, 2.5e-4))) is None
    assert found(deep(along=(-9e-4, 1e-6))) is None


def test_nothing_measured_nothing_found():
    assert found(step()) is None
    assert found(step(gradient=GradientRecord(method="exact"))) is None


def test_a_module_name_cannot_steer_a_terminal():
    assert "\x1b" not in found(deep(**FOUND, module="lm\x1b[31m")).evidence
