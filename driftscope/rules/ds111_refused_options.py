"""DS111: options that the fused path refuses with an error. Known from the run, not from a step."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.records import RunInfo
from driftscope.rules.base import Finding, Rule


def refused_finding(info: RunInfo) -> Finding | None:
    """The options that the installed TRL refuses together with the fused path, or ``None`` where there are none."""
    if not info.refused:
        return None
    rows = [f"{row.get('option', '?')} ({row.get('where', '?')}: {row.get('message', '')})" for row in info.refused]
    return Finding("info", RULE.title, printable("; ".join(dict.fromkeys(rows))), RULE.remedy)


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
)
