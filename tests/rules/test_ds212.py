from __future__ import annotations

from driftscope.records import ViolationRecord
from tests.canary_steps import found
from tests.record_factory import honest_ratio, step, truncated_ratio

CROSSED = ViolationRecord(
    limit="kl_high", figure="divergence.k3", value=0.2, allowed=0.12, nominal=0.1, source="verl docs\x1b[2J"
)


def test_a_crossed_limit_is_told_with_its_source():
    alert = found(step(is_ratio=honest_ratio(), violations=[CROSSED]), "DS212")
    assert alert.severity == "warning"
    assert "divergence.k3 0.200, limit 0.120, widened from 0.100 by the noise floor; verl docs [2J" in alert.evidence


def test_within_the_limits_there_is_nothing():
    assert found(step(is_ratio=honest_ratio()), "DS212") is None


def test_without_a_correction_it_is_information():
    ratio = honest_ratio()
    ratio.applied = None
    assert found(step(is_ratio=ratio, violations=[CROSSED]), "DS212").severity == "info"


def test_what_truncated_sampling_explains_is_left_to_ds201():
    assert found(step(is_ratio=truncated_ratio(), violations=[CROSSED]), "DS212") is None
