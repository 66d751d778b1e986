from __future__ import annotations

from tests.rules.stack_tables import predicted, row


def test_a_setting_that_the_fused_path_computes_otherwise_fires():
    finding = predicted("DS113", row("loss_type=luspo", "differs", 0.88))
    assert finding.severity == "warning"
    assert "loss_type=luspo" in finding.evidence and "0.880" in finding.evidence
    assert "use_liger_kernel=False" in finding.remedy
    assert predicted("DS113", row("temperature", "dropped", 11.0)).severity == "critical"
    assert predicted("DS113", row("is_correction", "differs", 1.3)).severity == "warning"


def test_it_is_silent_where_another_rule_speaks_or_nobody_uses_it():
    assert predicted("DS113", row("is_correction", "dropped", 11.0)) is None
    assert predicted("DS113", row("configuration", "differs", 11.0)) is None
    assert predicted("DS113", row("loss_type=luspo", "differs", 0.88, in_use=False)) is None
    assert predicted("DS113", row("loss_type=luspo", "honoured", 1.0)) is None
    own = row("loss_type=luspo", "differs", 0.88, path="reference")
    assert predicted("DS113", own) is None
    assert predicted("DS113", own, live="reference") is None
