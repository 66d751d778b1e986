from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS110"), None)


def deep(reported, measured, **fields):
    record = step(live_grad_norm=reported, **fields)
    record.paths["liger"].param_grad_norm = measured
    return record


def test_norms_that_disagree_fire():
    alert = found(deep(2.5, 2.4))
    assert alert.severity == "warning"
    assert "2.500" in alert.evidence
    assert "2.400" in alert.evidence
    assert found(deep(0.0, 2.4)) is not None


def test_norms_that_agree_do_not():
    assert found(deep(2.5, 2.51)) is None
    assert found(deep(0.0, 0.0)) is None


def test_rounding_does_not():
    assert found(deep(2.5, 2.4, noise=0.02)) is None


def test_an_unavailable_norm_says_nothing():
    assert found(deep(None, 2.4)) is None
    assert found(deep(2.5, None)) is None
