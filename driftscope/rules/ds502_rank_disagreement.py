"""DS502: a rank measures something else than the rest."""

from __future__ import annotations

from driftscope._text import sig
from driftscope.records import RankRow, Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite

WORDS = {
    "coef_error": "token coefficients that are off",
    "residual": "a gradient that its loss does not explain",
    "is_ratio": "another importance sampling ratio",
    "causes": "other terms missing from its loss",
}
FIELDS = {"coef_error": "coef_error", "residual": "residual", "is_ratio": "is_ratio_mean"}


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where a figure that should be the same on all ranks is not on some."""
    ranks = record.ranks
    found = {name: where for name, where in ranks.disagree.items() if name in WORDS} if ranks is not None else {}
    if ranks is None or not found:
        return None
    which = sorted({rank for where in found.values() for rank in where})
    evidence = "; ".join(_told(name, where, ranks.rows) for name, where in found.items())
    named = f"Rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which[:8]))}"
    title = f"{named} {'disagree' if len(which) > 1 else 'disagrees'} with the other ranks"
    severity: Severity = "critical" if "coef_error" in found or "causes" in found else "warning"
    return Finding(severity, title, evidence, RULE.remedy)


def _told(name: str, where: list[int], rows: list[RankRow]) -> str:
    field, listed = FIELDS.get(name), ", ".join(map(str, where[:8]))
    values = [(r.rank, v) for r in rows if field is not None and (v := finite(getattr(r, field))) is not None]
    apart = ", ".join(sig(v) for rank, v in values if rank in where)
    rest = ", ".join(sig(v) for rank, v in values if rank not in where)
    numbers = f": {field} {apart}" + (f", elsewhere {rest}" if rest else "") if apart else ""
    return f"rank {listed} has {WORDS[name]}{numbers}"


RULE = Rule(
    code="DS502",
    name="rank-disagreement",
    title="A rank disagrees with the other ranks",
    group="ranks",
    why=(
        "All ranks run the same code on their share of the batch, so what differs is a fault of one process: an "
        "engine that missed a weight update, another package version on one node, a patch applied on rank 0 only. "
        "The mean over ranks hides it: with eight ranks a ratio that is off by half on one moves the mean by 6%."
    ),
    condition=(
        "On an analysed step: the live path's coefficient error or residual is ten times the median of the other "
        "ranks' and over 1e-3; the mean token ratio differs from the others' by six standard errors and 5%; or other "
        "causes explain the gap there."
    ),
    remedy=(
        "Compare that rank's environment with rank 0's (pip freeze, environment variables, vLLM's logs of its weight "
        "updates), and set rank_journals=True to keep its own records. Until then its gradient is in every update."
    ),
    check=check,
)
