from __future__ import annotations

import pytest

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import honest_ratio, stats, step, truncated_ratio


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS202"), None)


def ratio(raw, applied=None, **fields):
    out = honest_ratio()
    out.raw = stats(raw, **fields)
    out.applied = stats(applied if applied is not None else raw)
    return out


@pytest.mark.parametrize(("mean", "severity"), [(0.05, "critical"), (0.4, "warning"), (2.5, "warning")])
def test_a_mean_far_from_one_fires(mean, severity):
    assert found(step(is_ratio=ratio(mean))).severity == severity


def test_a_mean_near_one_does_not():
    for mean in (0.6, 1.0, 1.9):
        assert found(step(is_ratio=ratio(mean))) is None


def test_few_effective_samples_fire():
    assert found(step(is_ratio=ratio(1.0, ess=0.2))).severity == "warning"
    assert found(step(is_ratio=ratio(1.0, ess=0.2, count=1))) is None


def test_what_truncated_sampling_explains_is_left_to_ds201():
    assert found(step(is_ratio=truncated_ratio())) is None


def test_all_masked_is_left_to_ds203():
    out = ratio(1.0, 0.0)
    out.applied.share_masked = 1.0
    assert found(step(is_ratio=out)) is None
    out.applied.share_masked = 0.5
    assert found(step(is_ratio=out)).severity == "critical"


def test_a_ratio_that_is_not_applied_is_only_information():
    out = ratio(0.05)
    out.applied = None
    assert found(step(is_ratio=out)).severity == "info"
