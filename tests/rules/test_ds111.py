from __future__ import annotations

from driftscope.rules import refused_finding
from tests.record_factory import info
from tests.rules.stack_tables import predicted, row


def test_refused_options_are_listed_as_information():
    finding = refused_finding(info(refused=[{"option": "delta", "where": "GRPOConfig", "message": "no\x1b[2J delta"}]))
    assert finding.severity == "info"
    assert "delta" in finding.evidence
    assert "\x1b" not in finding.evidence


def test_nothing_refused_is_no_finding():
    assert refused_finding(info()) is None


def test_before_a_run_a_refused_option_in_use_is_critical():
    refused = row("delta", "refused", message="no two-sided\x1b[2J loss")
    finding = predicted("DS111", refused, row("configuration", "refused", message="no two-sided loss"))
    assert finding.severity == "critical"
    assert "two-sided" in finding.evidence and "\x1b" not in finding.evidence
    assert "configuration" not in finding.evidence  # the option says it already
    assert "use_liger_kernel=False" in finding.remedy
    whole = predicted("DS111", row("configuration", "refused", message="both", path="reference"), live="reference")
    assert whole.severity == "critical" and "both" in whole.evidence and "liger" not in whole.remedy


def test_before_a_run_what_liger_would_refuse_is_information():
    unused = row("delta", "refused", message="no", in_use=False)
    assert predicted("DS111", unused).severity == "info"
    assert predicted("DS111", unused, live="reference") is None
    own = row("head_adapter", "refused", message="no", in_use=False, path="reference")
    assert predicted("DS111", own, live="reference") is None
    assert predicted("DS111", row("delta", "honoured", 1.0)) is None
