from __future__ import annotations

import re
from pathlib import Path

import pytest

from driftscope.errors import UsageError
from driftscope.records import SEVERITIES
from driftscope.rules import Thresholds, docs, evaluate, registry
from driftscope.rules.ds101_grad_norm_gap import RULE
from tests.record_factory import honest_ratio, seed_step, step

ROOT = Path(__file__).resolve().parents[2]


def test_codes_are_stable_and_in_order():
    groups = {
        1: 17,
        2: 13,
        3: 9,
        4: 4,
        5: 3,
        9: 1,
    }  # loss paths, sampling, gradient flow and PEFT, numerics, ranks, Driftscope itself
    expected = [f"DS{group}{n:02d}" for group, count in groups.items() for n in range(1, count + 1)]
    assert [rule.code for rule in registry()] == expected


def test_every_rule_has_a_file_of_its_own_and_a_test_file():
    for rule in registry():
        files = [p.name for p in (ROOT / "driftscope" / "rules").glob(f"{rule.code.lower()}_*.py")]
        assert len(files) == 1, rule.code
        assert (ROOT / "tests" / "rules" / f"test_{rule.code.lower()}.py").is_file(), rule.code


def test_every_rule_explains_itself():
    for rule in registry():
        assert len(re.findall(r"[.:;](?: |$)", rule.why)) >= 2, rule.code
        assert rule.title
        assert rule.condition
        assert len(rule.remedy) > 40
        assert (rule.check is None) == (rule.source != "step")
        assert rule.predict is not None or rule.source != "doctor"
        assert bool(rule.foreseen) == (rule.predict is not None and rule.source != "doctor"), rule.code


def test_the_committed_pages_are_up_to_date(tmp_path):
    assert docs.main([str(tmp_path)]) == 0
    committed = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "rules").glob("*.md")}
    assert committed == {p.name: p.read_text(encoding="utf-8") for p in tmp_path.glob("*.md")}


def test_docs_without_a_directory_is_wrong_use(capsys):
    assert docs.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_an_honest_step_has_no_finding():
    assert evaluate(step(is_ratio=honest_ratio())) == []


def test_findings_are_complete_and_ordered():
    alerts = evaluate(seed_step(7, rank=2, time=3.0))
    assert [a.rule for a in alerts] == ["DS101", "DS102", "DS103", "DS201"]
    for alert in alerts:
        assert (alert.step, alert.rank, alert.time) == (7, 2, 3.0)
        assert alert.severity in SEVERITIES
        assert alert.title
        assert alert.evidence
        assert alert.remedy


def test_a_rule_that_fails_does_not_silence_the_others(monkeypatch):
    def broken(record, thresholds):
        raise RuntimeError("on purpose")

    object.__setattr__(RULE, "check", broken)
    try:
        with pytest.raises(RuntimeError, match="on purpose"):
            evaluate(seed_step())
        told = []
        alerts = evaluate(seed_step(), on_error=lambda code, error: told.append((code, str(error))))
    finally:
        from driftscope.rules.ds101_grad_norm_gap import check

        object.__setattr__(RULE, "check", check)
    assert told == [("DS101", "on purpose")]
    assert [a.rule for a in alerts] == ["DS102", "DS103", "DS201"]


def test_thresholds_come_from_settings_and_survive_nonsense():
    assert Thresholds.from_settings({"gap_warning": 3, "console": True}).gap_warning == 3.0
    assert Thresholds.from_settings({"thresholds": {"gap_critical": 50.0}}).gap_critical == 50.0
    nonsense = {"gap_warning": "x", "gap_critical": float("nan"), "share": True, "thresholds": 3}
    assert Thresholds.from_settings(nonsense) == Thresholds()
    assert Thresholds.from_settings({"gap_warning": 0.5}) == Thresholds()
    with pytest.raises(UsageError, match=r"gap_warning=0\.5"):
        Thresholds(gap_warning=0.5)
