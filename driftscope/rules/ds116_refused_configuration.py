"""DS116: TRL refuses the configuration."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts
from driftscope.rules.base import Finding, Rule, Thresholds


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires on the error of TRL's own configuration class, unless the stack probe has found the very option."""
    why = facts.settings.refusal if facts.settings is not None else None
    if not why:
        return None
    table = facts.stack
    if table is not None and any(r.status == "refused" and r.in_use and r.path == table.live for r in table.rows):
        return None  # DS111 names the option
    return Finding("critical", RULE.title, printable(why), RULE.remedy)


RULE = Rule(
    code="DS116",
    name="refused-configuration",
    title="The installed TRL refuses this configuration",
    group="loss paths",
    why=(
        "The configuration class of the installed TRL was given these settings and raised an error: the run would end "
        "before its first step, perhaps after the job has waited for its machines."
    ),
    condition="TRL's own configuration class raises an error on the settings. Critical.",
    remedy="Change the setting that the error names: the evidence is TRL's own message.",
    source="doctor",
    predict=predict,
)
