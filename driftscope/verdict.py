"""The judgement of a whole run: a headline, what stands behind it, and what to change first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from driftscope._journal_reader import Run
from driftscope._run_facts import Facts, gather
from driftscope._verdict_advice import first_action
from driftscope._verdict_engine import ENGINE_RULES, gather_engine, sampling_line
from driftscope._verdict_words import headline, summary
from driftscope.reading.alerts import Alerts, RuleTally
from driftscope.reading.unjudged import Unjudged
from driftscope.records import SEVERITIES, AlertRecord, NoteRecord, RunInfo, Severity
from driftscope.rules import Finding, note_finding, refused_finding
from driftscope.rules._causes import honest_ratio_first

if TYPE_CHECKING:
    from driftscope.reading.summary import Summary

Level = Literal["clean", "info", "warning", "critical", "unavailable"]
NOT_JUDGED = ("DS111",)  # facts about the stack, listed but no reason to call a run anything but clean
_INPUTS_FIRST = ("DS401", *ENGINE_RULES.values(), "DS201", "DS202", "DS203")


@dataclass(frozen=True)
class FindingSummary:
    """One rule over the run: its worst finding, the step of the first one, and on how many steps it fired."""

    rule: str
    severity: Severity
    title: str
    evidence: str
    remedy: str
    first_step: int
    count: int


@dataclass(frozen=True)
class Verdict:
    """``level`` is that of the worst finding, ``unavailable`` where nothing was measured."""

    level: Level
    headline: str
    summary: list[str]
    first_action: str | None
    findings: list[FindingSummary]
    sampling: str | None = None
    """The latest importance sampling ratio and what makes it, in a line; ``None`` where the canary never looked."""


def judge(run: Run | Summary) -> Verdict:
    """The verdict on a run, from its records alone; never raises for a run that could be read.

    A ``Summary`` (``driftscope.reading.summarise``) stands for a run of any size: the verdict is the same, with
    medians of more than 4096 values within 0.05%.
    """
    facts, alerts, sampling = _gathered(run) if isinstance(run, Run) else (run.facts, run.alerts, run.sampling)
    findings = _findings(alerts, run.notes, run.info)
    worst = {f.rule: f.severity for f in findings}
    settings = run.info.trainer if run.info is not None else {}
    return Verdict(
        level=_level(facts, findings),
        headline=headline(facts, worst, {f.rule: f.title for f in findings}, settings),
        summary=summary(facts, worst, settings, run.problems),
        first_action=first_action(facts, worst, {f.rule: f.remedy for f in findings}, settings),
        findings=findings,
        sampling=sampling,
    )


def _gathered(run: Run) -> tuple[Facts | None, Alerts, str | None]:
    """What a run in memory says, gathered as ``summarise`` does it from a file."""
    alerts = Alerts()
    for alert in run.alerts:
        alerts.add(alert)
    unjudged = Unjudged(run.info, alerts)
    for record in run.steps:
        unjudged.evaluate(record)
    return gather(run.steps), alerts, sampling_line(gather_engine(run.steps))


def _level(facts: Facts | None, findings: list[FindingSummary]) -> Level:
    if facts is None:
        return "unavailable"
    judged = [f.severity for f in findings if f.rule not in NOT_JUDGED]
    return max(judged, key=SEVERITIES.index) if judged else "clean"


def _findings(alerts: Alerts, notes: Iterable[NoteRecord], info: RunInfo | None) -> list[FindingSummary]:
    """All findings by rule: worst first, and among equals the inputs before the paths."""
    extra = Alerts()
    for note in notes:
        extra.add(_as_alert("DS901", note.step, note_finding(note)))
    refused = refused_finding(info) if info is not None else None
    if refused is not None:
        extra.add(_as_alert("DS111", 0, refused))
    by_rule = alerts.all()
    for rule, tally in extra.rules.items():
        by_rule.setdefault(rule, RuleTally(alerts.stretches)).merge(tally)
    biased = "DS201" in by_rule and by_rule["DS201"].severity != "info"
    found = [_summarise(rule, tally, biased) for rule, tally in by_rule.items()]
    return sorted(found, key=_order)


def _order(finding: FindingSummary) -> tuple[int, int, str]:
    inputs = _INPUTS_FIRST.index(finding.rule) if finding.rule in _INPUTS_FIRST else len(_INPUTS_FIRST)
    return -SEVERITIES.index(finding.severity), inputs, finding.rule


def _as_alert(rule: str, step: int, finding: Finding) -> AlertRecord:
    return AlertRecord(
        step=step,
        rule=rule,
        severity=finding.severity,
        title=finding.title,
        evidence=finding.evidence,
        remedy=finding.remedy,
    )


def _summarise(rule: str, tally: RuleTally, biased: bool) -> FindingSummary:
    worst = tally.worst
    return FindingSummary(
        rule=rule,
        severity=worst["severity"],
        title=worst["title"],
        evidence=worst["evidence"],
        remedy=honest_ratio_first(worst["remedy"]) if biased else worst["remedy"],
        first_step=tally.first_step,
        count=tally.distinct,
    )
