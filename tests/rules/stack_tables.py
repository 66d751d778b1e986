"""Facts of a stack probe made up for the rules: one row after another."""

from __future__ import annotations

from typing import Any

from driftscope.doctor.facts import Facts, FeatureRow, StackTable
from driftscope.rules.base import Finding, Thresholds
from driftscope.rules.registry import registry


def row(feature: str, status: Any, factor: float | None = None, **fields: Any) -> FeatureRow:
    """A row in use on Liger's path, unless told otherwise."""
    error = None if factor is None else abs(factor - 1)
    return FeatureRow(
        **{"feature": feature, "path": "liger", "status": status, "factor": factor, "error": error, "in_use": True}
        | fields
    )


def predicted(code: str, *rows: FeatureRow, live: str = "liger", **limits: Any) -> Finding | None:
    """What a rule says of these rows."""
    (rule,) = [r for r in registry() if r.code == code]
    assert rule.predict is not None
    table = StackTable(rows=rows, live=live, versions={"trl": "0"}, seconds=1.0)
    assert rule.predict(Facts(), Thresholds()) is None, "no stack, no finding"
    return rule.predict(Facts(stack=table), Thresholds(**limits))
