from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step
from tests.rules.stack_tables import predicted, row


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS109"), None)


def test_an_unexplained_share_of_a_real_gap_fires():
    alert = found(step(ratio=2.0, left=0.4))
    assert alert.severity == "warning"
    assert "40%" in alert.evidence


def test_a_small_share_does_not():
    assert found(step(ratio=2.0, left=0.04)) is None


def test_an_unexplained_share_of_no_gap_does_not():
    assert found(step(ratio=1.0, cosine=1.0, left=1.0)) is None
    assert found(step(ratio=1.02, noise=0.02, left=1.0)) is None


def test_a_turned_gradient_counts_as_a_gap():
    assert found(step(ratio=1.0, cosine=0.9, left=1.0)).severity == "warning"


def test_a_residual_of_what_trains_is_a_warning_whoever_trains():
    for live in ("liger", "reference"):
        alert = found(step(ratio=1.0, live=live, residual=0.02))
        assert alert.severity == "warning"
        assert "2.0%" in alert.evidence


def test_a_residual_within_the_noise_is_not():
    assert found(step(residual=0.02, noise=0.01)) is None
    assert found(step(residual=9e-5)) is None


def test_a_residual_that_a_head_cause_explains_is_not_reported_twice():
    assert found(step(ratio=1.0, residual=0.3, causes=[("logit_transform", 1.0, 1.3)])) is None
    # The shadow's head cannot explain what the live path left over.
    assert found(step(ratio=1.0, live="reference", residual=0.3, causes=[("logit_transform", 1.0, 1.3)])) is not None


def test_extra_terms_fire_without_an_unexplained_share():
    assert found(step(ratio=2.0, causes=[("extra_terms", 1.0, 2.0)])).severity == "warning"


def test_a_shadow_is_only_information():
    assert found(step(ratio=2.0, live="reference", left=0.4)).severity == "info"


def test_before_a_run_a_whole_that_no_part_explains_fires():
    finding = predicted("DS109", row("configuration", "differs", 1.4), row("delta", "honoured", 1.0))
    assert finding.severity == "warning" and "1.40" in finding.evidence
    assert predicted("DS109", row("configuration", "differs", 14.0)).severity == "critical"


def test_before_a_run_a_part_that_explains_keeps_it_silent():
    whole = row("configuration", "differs", 1.4)
    assert predicted("DS109", whole, row("is_correction", "dropped", 2.0)) is None
    assert predicted("DS109", whole, row("loss_type=luspo", "differs", 2.0)) is None
    assert predicted("DS109", row("configuration", "honoured", 1.0)) is None
    assert predicted("DS109", row("configuration", "differs", 1.4, path="reference")) is None
    unused = row("is_correction", "dropped", 2.0, in_use=False)
    assert predicted("DS109", whole, unused) is not None
