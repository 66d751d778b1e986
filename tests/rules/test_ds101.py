from __future__ import annotations

import pytest

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import seed_step, step


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS101"), None)


@pytest.mark.parametrize(
    ("ratio", "severity"),
    [
        (118.0, "critical"),
        (1 / 118.0, "critical"),
        (10.0, "critical"),
        (2.0, "warning"),
        (0.5, "warning"),
        (1.5, "warning"),
    ],
)
def test_a_gap_of_the_live_path_fires_in_both_directions(ratio, severity):
    alert = found(step(ratio=ratio))
    assert alert.severity == severity
    assert ("larger" if ratio > 1 else "smaller") in alert.title


@pytest.mark.parametrize("ratio", [1.0, 1.4, 1 / 1.4])
def test_equal_paths_do_not(ratio):
    assert found(step(ratio=ratio)) is None


def test_a_gap_inside_the_noise_does_not():
    assert found(step(ratio=2.0, noise=0.3)) is None
    assert found(step(ratio=2.0, noise=0.2)).severity == "warning"


def test_an_unmeasured_noise_floor_is_not_taken_as_zero():
    assert found(step(ratio=1.02, noise=None), gap_warning=1.01) is not None
    assert found(step(ratio=1.011, noise=None), gap_warning=1.01) is None
    assert found(step(ratio=1.011, noise=0.0), gap_warning=1.01) is not None


def test_a_shadow_is_only_information():
    alert = found(step(ratio=118.0, live="reference"))
    assert alert.severity == "info"
    assert "would" in alert.title
    assert "use_liger_kernel" in alert.title


def test_a_shadow_beside_a_fused_head_is_not_called_a_setting():
    assert found(step(ratio=118.0, live="reference", live_head="fused")).title.startswith("Liger's own loss would")


def test_a_reference_of_exactly_zero_is_an_infinite_gap():
    record = step(ratio=2.0)
    record.gap.grad_norm_ratio = None
    record.paths["reference"].hidden_grad_norm = 0.0
    assert found(record).severity == "critical"


def test_the_parameter_norm_alone_is_enough():
    record = step(ratio=1.0)
    record.gap.param_grad_norm_ratio = 12.0
    assert found(record).severity == "critical"


def test_unavailable_norms_say_nothing():
    record = step(ratio=2.0)
    record.gap.grad_norm_ratio = None
    record.paths["reference"].hidden_grad_norm = None
    assert found(record) is None
    assert found(step(gap=None)) is None


def test_the_remedy_does_not_merely_switch_paths_when_the_ratio_is_biased():
    assert "DS201" in found(seed_step()).remedy


def test_a_live_reference_against_the_oracle_is_not_helped_by_switching():
    alert = found(step(ratio=3.0, live="reference", candidate="reference", reference="oracle"))
    assert alert.severity == "warning"
    assert "switching paths does not help" in alert.remedy
