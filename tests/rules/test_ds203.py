from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import honest_ratio, stats, step


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS203"), None)


def applied(**fields):
    out = honest_ratio()
    out.applied = stats(0.0, **fields)
    return step(is_ratio=out)


def test_all_masked_fires():
    alert = found(applied(share_masked=1.0))
    assert alert.severity == "warning"
    assert "nothing is trained" in alert.title


def test_all_capped_fires():
    assert "constant" in found(applied(share_capped=1.0)).title


def test_some_masked_does_not():
    assert found(applied(share_masked=0.75)) is None
    assert found(step(is_ratio=honest_ratio())) is None


def test_a_single_ratio_is_only_information():
    assert found(applied(share_masked=1.0, count=1)).severity == "info"


def test_no_ratio_says_nothing():
    assert found(applied(share_masked=1.0, count=0)) is None
