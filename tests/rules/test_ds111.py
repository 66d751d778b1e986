from __future__ import annotations

from driftscope.rules import refused_finding
from tests.record_factory import info


def test_refused_options_are_listed_as_information():
    finding = refused_finding(info(refused=[{"option": "delta", "where": "GRPOConfig", "message": "no\x1b[2J delta"}]))
    assert finding.severity == "info"
    assert "delta" in finding.evidence
    assert "\x1b" not in finding.evidence


def test_nothing_refused_is_no_finding():
    assert refused_finding(info()) is None
