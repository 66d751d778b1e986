from __future__ import annotations

from driftscope.records import RankRow, RanksRecord
from driftscope.rules import Thresholds
from driftscope.rules.ds503_rank_normalizer import RULE
from tests.record_factory import step


def ranks(divisors: list[float | None], disagree: list[int]) -> RanksRecord:
    rows = [RankRow(rank=r, tokens=10 * (r + 1), normalizer_measured=d) for r, d in enumerate(divisors)]
    return RanksRecord(processes=len(rows), rows=rows, disagree={"normalizer": disagree} if disagree else {})


def test_the_ledger_is_in_the_evidence():
    finding = RULE.check(step(ranks=ranks([10.0, 20.0], [0, 1])), Thresholds())
    assert finding.severity == "warning"
    assert "rank 0: 10.0 for 10 tokens, rank 1: 20.0 for 20 tokens" in finding.evidence
    assert "2.00 times" in finding.evidence


def test_an_order_of_magnitude_is_critical():
    assert RULE.check(step(ranks=ranks([1.0, 20.0], [0])), Thresholds()).severity == "critical"


def test_one_divisor_is_no_finding():
    assert RULE.check(step(ranks=ranks([15.0, 15.0], [])), Thresholds()) is None
    assert RULE.check(step(ranks=ranks([15.0, None], [0])), Thresholds()) is None
    assert RULE.check(step(), Thresholds()) is None
