from __future__ import annotations

import pytest

from driftscope.records import RankRow, RanksRecord
from driftscope.rules import Thresholds
from driftscope.rules.ds502_rank_disagreement import RULE
from tests.record_factory import step


def ranks(**disagree: list[int]) -> RanksRecord:
    rows = [RankRow(rank=r, is_ratio_mean=0.5 if r == 1 else 1.0, coef_error=1e-8) for r in range(3)]
    return RanksRecord(processes=3, rows=rows, disagree=disagree)


def test_the_rank_and_both_figures_are_named():
    finding = RULE.check(step(ranks=ranks(is_ratio=[1])), Thresholds())
    assert finding.severity == "warning"
    assert finding.title == "Rank 1 disagrees with the other ranks"
    assert "is_ratio_mean 0.500, elsewhere 1.00, 1.00" in finding.evidence


@pytest.mark.parametrize("what", ["coef_error", "causes"])
def test_another_loss_on_a_rank_is_critical(what):
    finding = RULE.check(step(ranks=ranks(**{what: [0, 2]})), Thresholds())
    assert finding.severity == "critical"
    assert "Ranks 0, 2 disagree" in finding.title


def test_agreement_is_no_finding():
    assert RULE.check(step(ranks=ranks()), Thresholds()) is None
    assert RULE.check(step(ranks=ranks(normalizer=[1])), Thresholds()) is None  # DS503's
    assert RULE.check(step(), Thresholds()) is None
