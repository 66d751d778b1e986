from __future__ import annotations

import math

import pytest

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import honest_ratio, step


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS401"), None)


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("live_grad_norm", "critical"),
        ("live hidden gradient", "critical"),
        ("paths.liger.loss", "critical"),
        ("paths.reference.loss", "warning"),
        ("is_ratio.raw.max", "warning"),
        ("is_ratio.applied.mean", "critical"),
        ("gap.loss_diff", "warning"),
    ],
)
def test_a_named_value_fires(name, severity):
    alert = found(step(nonfinite=[name]))
    assert alert.severity == severity
    assert name in alert.evidence


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_nobody_named_is_seen(value):
    record = step()
    record.paths["liger"].loss = value
    assert "paths.liger.loss" in found(record).evidence


def test_finite_records_do_not():
    assert found(step(is_ratio=honest_ratio())) is None


def test_a_fused_path_that_does_not_train_is_only_information():
    assert found(step(live="reference", nonfinite=["paths.liger.loss"])).severity == "info"


def test_a_division_by_a_gradient_of_zero_is_no_fault():
    record = step(nonfinite=["gap.grad_norm_ratio", "causes.0.factor"])
    record.paths["reference"].hidden_grad_norm = 0.0
    assert found(record) is None
    record.paths["liger"].hidden_grad_norm = None
    assert found(record) is not None


def test_many_names_are_cut():
    alert = found(step(nonfinite=[f"paths.liger.x{i}" for i in range(20)]))
    assert "and 12 more" in alert.evidence


def test_other_rules_survive_non_finite_records():
    record = step(
        ratio=math.nan, cosine=math.inf, noise=math.nan, residual=math.inf, causes=[("normalizer", 1.0, math.nan)]
    )
    assert [a.rule for a in evaluate(record)].count("DS401") == 1
