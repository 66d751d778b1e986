from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step
from tests.rules.stack_tables import predicted, row


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS112"), None)


def off(error, **fields):
    record = step(**fields)
    record.paths["reference"].coef_error = error
    return record


def test_a_reference_that_is_off_fires():
    assert found(off(0.02)).severity == "warning"


def test_rounding_does_not():
    assert found(off(9e-5)) is None
    assert found(off(0.01, noise=0.005)) is None
    assert found(off(None)) is None


def test_the_divisors_are_named_where_they_differ():
    record = off(1.0)
    assert "divisor" not in found(record).evidence
    record.paths["reference"].normalizer_measured = 50.0
    assert "divisor 50.00 instead of 100.0" in found(record).evidence


def test_a_live_reference_far_off_is_critical():
    record = off(19.0, live="reference")
    record.paths["reference"].hidden_grad_norm = 0.4
    assert found(record).severity == "critical"
    record.live = "liger"
    assert found(record).severity == "warning"


def test_before_a_run_a_setting_that_trls_own_path_computes_otherwise_fires():
    steps = row("steps_per_generation", "dropped", 0.5, path="reference")
    finding = predicted("DS112", steps, live="reference")
    assert finding.severity == "warning" and "0.500" in finding.evidence
    luspo = row("loss_type=luspo", "differs", 0.05, path="reference")
    assert predicted("DS112", luspo, live="reference").severity == "critical"


def test_before_a_run_it_is_silent_where_another_path_trains_or_another_rule_speaks():
    steps = row("steps_per_generation", "dropped", 0.5, path="reference")
    assert predicted("DS112", steps, live="liger") is None
    assert predicted("DS112", row("steps_per_generation", "dropped", 0.5), live="liger") is None
    assert predicted("DS112", row("delta", "dropped", 2.0, path="reference"), live="reference") is None
    assert predicted("DS112", row("configuration", "differs", 2.0, path="reference"), live="reference") is None
