from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step, truncated_ratio


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS105"), None)


def test_a_large_factor_is_critical_and_a_small_one_a_warning():
    assert found(step(ratio=20.0, causes=[("kl_bias_correction", 1.0, 20.0)])).severity == "critical"
    assert found(step(ratio=1 / 20.0, causes=[("kl_bias_correction", 1.0, 1 / 20.0)])).severity == "critical"
    assert found(step(ratio=2.0, causes=[("kl_bias_correction", 1.0, 2.0)])).severity == "warning"
    assert found(step(ratio=1.03, causes=[("kl_bias_correction", 1.0, 1.03)])).severity == "warning"


def test_a_gradient_that_turns_without_growing_is_a_warning():
    assert found(step(ratio=1.0, cosine=0.9, causes=[("kl_bias_correction", 1.0, 1.0)])).severity == "warning"


def test_no_effect_is_only_information():
    alert = found(step(ratio=1.0, causes=[("kl_bias_correction", 1.0, 1.0)]))
    assert alert.severity == "info"


def test_a_difference_inside_the_noise_is_only_information():
    assert found(step(ratio=1.03, noise=0.05, causes=[("kl_bias_correction", 1.0, 1.03)])).severity == "info"


def test_a_path_without_the_cause_does_not_fire():
    assert found(step(ratio=118.0, causes=[("normalizer", 1.0, 118.0)])) is None


def test_a_shadow_never_exceeds_information():
    alert = found(step(ratio=118.0, live="reference", causes=[("kl_bias_correction", 1.0, 118.0)]))
    assert alert.severity == "info"
    assert "would" in alert.title
    assert found(step(ratio=1.0, live="reference", causes=[("kl_bias_correction", 1.0, 1.0)])) is None


def test_the_evidence_carries_the_numbers():
    evidence = found(step(ratio=118.0, causes=[("kl_bias_correction", 0.94, 88.0)])).evidence
    assert "94%" in evidence
    assert "88" in evidence
    assert "118" in evidence


def test_a_biased_ratio_comes_before_leaving_the_path():
    record = step(ratio=118.0, causes=[("kl_bias_correction", 1.0, 118.0)], is_ratio=truncated_ratio())
    remedy = found(record).remedy
    assert "use_liger_kernel=False" not in remedy or remedy.startswith(
        "First make the importance sampling ratio honest"
    )
