"""DS111: options that the fused path refuses with an error. Known from the run, not from a step."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts, FeatureRow
from driftscope.records import RunInfo
from driftscope.rules._stack import WHOLE
from driftscope.rules.base import Finding, Rule, Thresholds


def refused_finding(info: RunInfo) -> Finding | None:
    """The options that the installed TRL refuses together with the fused path, or ``None`` where there are none."""
    if not info.refused:
        return None
    rows = [f"{row.get('option', '?')} ({row.get('where', '?')}: {row.get('message', '')})" for row in info.refused]
    return Finding("info", RULE.title, printable("; ".join(dict.fromkeys(rows))), RULE.remedy)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Critical where the configuration itself is refused; info lists what the fused path would refuse."""
    table = facts.stack
    if table is None:
        return None
    refused = [r for r in table.rows if r.path == table.live and r.status == "refused"]
    used = [r for r in refused if r.in_use]
    if used:
        single = [r for r in used if r.feature != WHOLE] or used
        remedy = "Unset the option: the run would end with this error."
        if table.live == "liger":
            remedy = "Unset the option, or set use_liger_kernel=False: the run would end with this error."
        return Finding("critical", "The installed TRL refuses this configuration", _listed(single), remedy)
    if table.live != "liger" or not refused:
        return None
    return Finding("info", RULE.title, _listed(refused), RULE.remedy)


def _listed(rows: list[FeatureRow]) -> str:
    return printable("; ".join(dict.fromkeys(f"{r.feature}: {r.message}" for r in rows)))


RULE = Rule(
    code="DS111",
    name="refused-options",
    title="Options that the fused path refuses with an error",
    group="loss paths",
    why=(
        "Some options of GRPOConfig are not in the fused loss, and TRL says so with an error when both are set. That "
        "is no silent difference; it is listed so that you know what becomes unavailable with use_liger_kernel."
    ),
    condition="The installed TRL raises an error for the option together with use_liger_kernel=True. Always info.",
    remedy="Nothing to do unless you need the option: then set use_liger_kernel=False.",
    check=None,
    source="run",
    predict=predict,
    foreseen=(
        "The stack probe built a real trainer with the option and ran a training step: it raised an error. Critical "
        "if the configuration at hand uses the option on the path that it trains on; info for the other options of a "
        "run with Liger's loss."
    ),
)
