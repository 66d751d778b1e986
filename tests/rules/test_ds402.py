from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS402"), None)


def test_an_all_zero_mask_is_a_warning():
    alert = found(step(tokens=0, completion_tokens=40))
    assert alert.severity == "warning"
    assert "40" in alert.evidence


def test_equal_rewards_are_information():
    assert found(step(zero_advantage_share=1.0)).severity == "info"


def test_something_to_train_on_does_not_fire():
    assert found(step(zero_advantage_share=0.75)) is None
    assert found(step(tokens=None, zero_advantage_share=None)) is None
