from __future__ import annotations

import pytest

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import honest_ratio, step, truncated_ratio


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS201"), None)


@pytest.mark.parametrize(
    ("kept", "mean", "severity"),
    [(0.81, 0.0063, "critical"), (0.97, 0.4, "warning"), (0.97, 0.9, "warning"), (0.999, 0.97, "info")],
)
def test_truncated_support_fires_by_its_effect(kept, mean, severity):
    alert = found(step(is_ratio=truncated_ratio(kept, mean)))
    assert alert.severity == severity
    assert "token_truncate" in alert.remedy


def test_an_honest_ratio_does_not():
    assert found(step(is_ratio=honest_ratio())) is None
    assert found(step()) is None


def test_a_kept_mass_that_explains_little_does_not():
    ratio = truncated_ratio(0.98, 0.01)
    ratio.truncated_support_share = 0.1
    assert found(step(is_ratio=ratio)) is None


def test_without_a_share_the_token_ratio_decides():
    ratio = truncated_ratio()
    ratio.truncated_support_share = None
    assert found(step(is_ratio=ratio)).severity == "critical"
    ratio.raw_token.mean = 0.2
    assert found(step(is_ratio=ratio)) is None


def test_an_unknown_kept_mass_says_nothing():
    ratio = truncated_ratio()
    ratio.kept_mass = None
    assert found(step(is_ratio=ratio)) is None


def test_a_correction_that_is_off_is_only_information():
    ratio = truncated_ratio()
    ratio.applied = None
    assert found(step(is_ratio=ratio)).severity == "info"


def test_a_token_mode_is_not_advised_to_those_who_have_one():
    alert = found(step(is_ratio=truncated_ratio(0.81, 0.81, "token_truncate")))
    assert alert.severity == "warning"
    assert "token_truncate" not in alert.remedy
