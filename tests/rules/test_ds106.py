from __future__ import annotations

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import step, truncated_ratio
from tests.rules.stack_tables import predicted, row


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS106"), None)


def test_a_large_factor_is_critical_and_a_small_one_a_warning():
    assert found(step(ratio=20.0, causes=[("delta_clamp", 1.0, 20.0)])).severity == "critical"
    assert found(step(ratio=1 / 20.0, causes=[("delta_clamp", 1.0, 1 / 20.0)])).severity == "critical"
    assert found(step(ratio=2.0, causes=[("delta_clamp", 1.0, 2.0)])).severity == "warning"
    assert found(step(ratio=1.03, causes=[("delta_clamp", 1.0, 1.03)])).severity == "warning"


def test_a_gradient_that_turns_without_growing_is_a_warning():
    assert found(step(ratio=1.0, cosine=0.9, causes=[("delta_clamp", 1.0, 1.0)])).severity == "warning"


def test_no_effect_is_only_information():
    alert = found(step(ratio=1.0, causes=[("delta_clamp", 1.0, 1.0)]))
    assert alert.severity == "info"


def test_a_difference_inside_the_noise_is_only_information():
    assert found(step(ratio=1.03, noise=0.05, causes=[("delta_clamp", 1.0, 1.03)])).severity == "info"


def test_a_path_without_the_cause_does_not_fire():
    assert found(step(ratio=118.0, causes=[("normalizer", 1.0, 118.0)])) is None


def test_a_shadow_never_exceeds_information():
    alert = found(step(ratio=118.0, live="reference", causes=[("delta_clamp", 1.0, 118.0)]))
    assert alert.severity == "info"
    assert "would" in alert.title
    assert found(step(ratio=1.0, live="reference", causes=[("delta_clamp", 1.0, 1.0)])) is None


def test_the_evidence_carries_the_numbers():
    evidence = found(step(ratio=118.0, causes=[("delta_clamp", 0.94, 88.0)])).evidence
    assert "94%" in evidence
    assert "88" in evidence
    assert "118" in evidence


def test_a_biased_ratio_comes_before_leaving_the_path():
    record = step(ratio=118.0, causes=[("delta_clamp", 1.0, 118.0)], is_ratio=truncated_ratio())
    remedy = found(record).remedy
    assert "use_liger_kernel=False" not in remedy or remedy.startswith(
        "First make the importance sampling ratio honest"
    )


def test_before_a_run_a_dropped_term_in_use_fires():
    finding = predicted("DS106", row("delta", "dropped", 1.2))
    assert finding.severity == "warning"
    assert "delta" in finding.title and finding.title.startswith("The fused Liger path")
    assert "1.20" in finding.evidence
    assert predicted("DS106", row("delta", "dropped", 12.0)).severity == "critical"
    assert predicted("DS106", row("delta", "dropped", 1 / 12.0)).severity == "critical"
    assert predicted("DS106", row("delta", "dropped", 12.0), gap_critical=20.0).severity == "warning"


def test_before_a_run_it_is_silent_about_what_is_honoured_unused_or_on_the_other_path():
    for quiet in (
        row("delta", "honoured", 1.0),
        row("delta", "unavailable"),
        row("delta", "refused", message="no"),
        row("delta", "differs", 3.0),
        row("delta", "dropped", 12.0, in_use=False),
        row("delta", "dropped", 12.0, path="reference"),
        row("temperature", "dropped", 12.0),
    ):
        assert predicted("DS106", quiet) is None
    own = predicted("DS106", row("delta", "dropped", 12.0, path="reference"), live="reference")
    assert own.title.startswith("TRL's own path")
