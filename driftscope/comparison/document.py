"""The comparison as plain JSON types: what ``driftscope compare --json`` prints."""

from __future__ import annotations

import math
from typing import Any

from driftscope.comparison.model import Cell, Comparison, FindingCell, RunColumn


def as_document(c: Comparison, *, fail_on: str | None, exit_code: int) -> dict[str, Any]:
    """Everything that the comparison holds but the series. Values per run stand in the order of ``runs``."""
    return {
        "headline": c.headline,
        "summary": list(c.sentences),
        "baseline": c.baseline,
        "runs": [_run(run) for run in c.runs],
        "settings": [{"section": s.section, "name": s.name, "values": list(s.values)} for s in c.settings],
        "figures": [
            {
                "id": row.figure.id,
                "label": row.figure.label,
                "unit": row.figure.unit,
                "scale": row.figure.scale,
                "runs": [_cell(cell) for cell in row.cells],
            }
            for row in c.figures
        ],
        "findings": [
            {"rule": row.rule, "title": row.title, "runs": [_finding(cell) for cell in row.cells]}
            for row in c.findings
        ],
        "replicates": [list(group) for group in c.replicates],
        "skipped": [{"path": s.path, "why": s.why} for s in c.skipped],
        "notes": list(c.notes),
        "fail_on": fail_on,
        "exit_code": exit_code,
    }


def _run(run: RunColumn) -> dict[str, Any]:
    return {
        "label": run.label,
        "path": str(run.path),
        "run_id": run.run_id,
        "status": run.status,
        "level": run.level,
        "headline": run.headline,
        "live": run.live,
        "compares": list(run.pair) if run.pair is not None else None,
        "first_step": run.first_step,
        "last_step": run.last_step,
        "unavailable": run.unavailable,
        "problems": list(run.problems),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "value": _number(cell.value),
        "change": _number(cell.change),
        "bar": _number(cell.bar),
        "pairs": cell.pairs,
        "independent": round(cell.independent, 1),
        "mark": cell.mark,
    }


def _finding(cell: FindingCell) -> dict[str, Any]:
    found = cell.found
    return {
        "severity": found.severity if found is not None else None,
        "first_step": found.first_step if found is not None else None,
        "count": found.count if found is not None else 0,
        "change": cell.change,
        "late": cell.late,
        "chance": cell.chance,
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
