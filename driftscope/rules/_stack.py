"""How a row of the stack probe becomes a finding: the part that the rules of the loss paths share."""

from __future__ import annotations

from collections.abc import Collection

from driftscope._text import path_words, percent, sentence, sig
from driftscope.doctor.facts import Facts, FeatureRow, StackTable
from driftscope.records import Severity
from driftscope.rules.base import Finding, Thresholds, crossed

OWN_RULE = frozenset(
    {
        "is_correction",
        "normalizer",
        "tool_mask",
        "kl_bias_correction",
        "delta",
        "logit_softcap",
        "logit_scale",
        "head_adapter",
    }
)
"""Features whose being dropped has a rule of its own, DS102 to DS108."""
WHOLE = "configuration"
FORESEEN = (
    "The stack probe ran the installed code of the path that the configuration trains on, on a small synthetic batch: "
    "its gradient equals that of the loss without this term. The configuration uses the term. Critical if the norm is "
    "off by gap_critical (10) or more, else warning. The factor is that of the synthetic batch"
)


def live_rows(facts: Facts, statuses: Collection[str]) -> list[FeatureRow]:
    """The rows of the path that the configuration trains on, in use and of one of these statuses."""
    if facts.stack is None:
        return []
    return [r for r in facts.stack.rows if r.path == facts.stack.live and r.in_use and r.status in statuses]


def dropped_finding(
    facts: Facts, thresholds: Thresholds, features: Collection[str], *, does: str, remedy: str, extra: str = ""
) -> Finding | None:
    """The finding of terms that the live path leaves out, or ``None``. does: ``drops ...``."""
    rows = [r for r in live_rows(facts, ("dropped",)) if r.feature in features]
    if not rows or facts.stack is None:
        return None
    title = f"{sentence(path_words(facts.stack.live))} {does}"
    return Finding(
        severity_of(rows, thresholds), title, "; ".join([*map(words, rows), *filter(None, [extra])]), remedy
    )


def different_rows(facts: Facts) -> list[FeatureRow]:
    """Rows of the live path that are computed otherwise than configured, and that no rule of their own covers."""
    return [
        r
        for r in live_rows(facts, ("dropped", "differs"))
        if r.feature != WHOLE and not (r.status == "dropped" and r.feature in OWN_RULE)
    ]


def different_finding(facts: Facts, thresholds: Thresholds, *, path: str, title: str, remedy: str) -> Finding | None:
    """The finding of ``different_rows`` where ``path`` is what trains."""
    rows = different_rows(facts)
    if facts.stack is None or facts.stack.live != path or not rows:
        return None
    return Finding(severity_of(rows, thresholds), title, "; ".join(map(words, rows)), remedy)


def severity_of(rows: Collection[FeatureRow], thresholds: Thresholds) -> Severity:
    """Critical where one of the factors reaches ``gap_critical``, either way."""
    factors = [r.factor for r in rows if r.factor is not None]
    return "critical" if any(crossed(f, thresholds.gap_critical, 0.0) for f in factors) else "warning"


def words(row: FeatureRow) -> str:
    """A row's numbers in words."""
    state = "left out" if row.status == "dropped" else "neither as configured nor left out"
    return (
        f"{row.feature}: {state} on a synthetic batch; hidden gradient norm {sig(row.factor)} times the configured "
        f"loss's, relative error {percent(row.error)}"
    )


def stack_words(table: StackTable) -> str:
    """The packages of the stack that the loss is in."""
    return ", ".join(f"{name} {table.versions[name]}" for name in ("trl", "liger_kernel") if name in table.versions)
