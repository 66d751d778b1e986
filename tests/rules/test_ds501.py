from __future__ import annotations

import pytest

from driftscope.records import RanksRecord
from driftscope.rules import Thresholds
from driftscope.rules.ds501_straggler import RULE
from tests.record_factory import step


def ranks(slow: float | None, usual: float | None) -> RanksRecord:
    return RanksRecord(processes=4, slowest=2 if slow is not None else None, slowest_ms=slow, median_ms=usual)


def test_a_slow_rank_is_named_with_its_times():
    finding = RULE.check(step(ranks=ranks(90.0, 45.0)), Thresholds())
    assert finding.severity == "warning"
    assert "Rank 2" in finding.title
    assert "90.0 ms" in finding.evidence
    assert "45.0 ms" in finding.evidence


@pytest.mark.parametrize(("slow", "usual"), [(50.0, 45.0), (None, None), (50.0, 0.0), (float("nan"), 45.0)])
def test_even_or_unknown_times_are_no_finding(slow, usual):
    assert RULE.check(step(ranks=ranks(slow, usual)), Thresholds()) is None


def test_it_is_said_on_analysed_steps_only():
    assert RULE.check(step(ranks=ranks(90.0, 45.0), tier="light"), Thresholds()) is None
    assert RULE.check(step(), Thresholds()) is None
