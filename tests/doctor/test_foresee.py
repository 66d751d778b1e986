"""Rules on facts: selection, order, failure, and the document."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from driftscope.doctor import Facts, FeatureRow, Settings, StackTable, chosen_rules, foresee
from driftscope.doctor.document import as_document
from driftscope.errors import UsageError
from driftscope.rules import Finding, Rule


def rule(code: str, severity: Any) -> Rule:
    def predict(facts: Facts, thresholds: object) -> Finding | None:
        if severity == "raise":
            raise RuntimeError("on purpose")
        return Finding(severity, f"title {code}", "evidence", "remedy") if severity else None

    return Rule(
        code=code,
        name=code,
        title=code,
        group="test",
        why="",
        condition="",
        remedy="",
        source="doctor",
        predict=predict,
    )


def test_the_worst_comes_first_and_a_failure_is_told():
    rules = [rule("X003", "info"), rule("X002", "warning"), rule("X001", "critical"), rule("X004", "raise")]
    found = foresee(Facts(), rules=[*rules, rule("X005", None), rule("X000", "warning")])
    assert found.rules == ("X001", "X000", "X002", "X003")
    assert found.failed == {"X004": "RuntimeError: on purpose"}
    assert len(found) == 4
    assert found[0].title == "title X001"
    assert [f.rule for f in found[1:3]] == ["X000", "X002"]
    assert "CRITICAL X001" in str(found)


def test_no_facts_no_findings():
    found = foresee(Facts())
    assert not found
    assert not found.failed
    assert "nothing found" in str(found)


def test_rules_are_chosen_by_code_and_group():
    codes = {r.code for r in chosen_rules(["DS1", "DS201"], ["DS10"])}
    assert {"DS111", "DS201"} <= codes
    assert not any(code.startswith(("DS10", "DS3")) for code in codes)
    assert {r.code for r in chosen_rules()} > codes
    for wrong in (["DS7"], ["ds101x"], [""]):
        with pytest.raises(UsageError, match="is no rule or group"):
            chosen_rules(wrong)
        with pytest.raises(UsageError, match="is no rule or group"):
            chosen_rules((), wrong)


def test_the_document_is_json_whatever_was_measured():
    table = StackTable(
        rows=(FeatureRow(feature="normalizer", path="liger", status="dropped", factor=math.inf),),
        live="liger",
        versions={"trl": "9.9"},
        seconds=1.0,
    )
    settings = Settings(values={"top_p": 0.8, "beta": 0.0}, given=frozenset({"top_p"}), source="run.yaml")
    facts = Facts(settings=settings, stack=table, unavailable={"flow": "no model"})
    document = json.loads(json.dumps(as_document(foresee(facts, rules=[rule("X001", "info")]), exit_code=0)))
    assert document["findings"] == [
        {"severity": "info", "title": "title X001", "evidence": "evidence", "remedy": "remedy", "rule": "X001"}
    ]
    assert document["settings"]["given"] == {"top_p": 0.8}
    assert document["stack"]["rows"][0]["factor"] is None  # JSON has no infinity
    assert document["stack"]["rows"][0]["status"] == "dropped"
    assert document["unavailable"] == {"flow": "no model"}
    assert document["flow"] is None
    assert document["exit_code"] == 0


def test_the_live_path_is_the_one_a_row_is_looked_up_on():
    rows = tuple(
        FeatureRow(feature="delta", path=p, status=s) for p, s in (("liger", "dropped"), ("reference", "honoured"))
    )  # type: ignore[arg-type]
    table = StackTable(rows=rows, live="reference", versions={}, seconds=0.0)
    assert table.find("delta").status == "honoured"
    assert table.find("delta", "liger").status == "dropped"
    assert table.find("tool_mask") is None
