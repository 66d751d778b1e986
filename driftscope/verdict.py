"""The judgement of a whole run: a headline, what stands behind it, and what to change first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from driftscope._journal_reader import Run
from driftscope._run_facts import Facts, gather
from driftscope._verdict_advice import first_action
from driftscope._verdict_engine import ENGINE_RULES, sampling_line
from driftscope._verdict_words import headline, summary
from driftscope.records import SEVERITIES, AlertRecord, Severity
from driftscope.rules import Finding, Thresholds, evaluate, note_finding, refused_finding
from driftscope.rules._causes import honest_ratio_first

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


def judge(run: Run) -> Verdict:
    """The verdict on a run, from its records alone; never raises for a run that could be read."""
    facts = gather(run)
    findings = _findings(run)
    worst = {f.rule: f.severity for f in findings}
    level = _level(facts, findings)
    settings = run.info.trainer if run.info is not None else {}
    return Verdict(
        level=level,
        headline=headline(facts, worst, {f.rule: f.title for f in findings}, settings),
        summary=summary(facts, worst, settings, run.problems),
        first_action=first_action(facts, worst, {f.rule: f.remedy for f in findings}, settings),
        findings=findings,
        sampling=sampling_line(run.steps),
    )


def _level(facts: Facts | None, findings: list[FindingSummary]) -> Level:
    if facts is None:
        return "unavailable"
    judged = [f.severity for f in findings if f.rule not in NOT_JUDGED]
    return max(judged, key=SEVERITIES.index) if judged else "clean"


def _findings(run: Run) -> list[FindingSummary]:
    """All findings by rule: worst first, and among equals the inputs before the paths."""
    by_rule: dict[str, list[AlertRecord]] = {}
    for alert in _alerts(run):
        by_rule.setdefault(alert.rule, []).append(alert)
    biased = any(a.severity != "info" for a in by_rule.get("DS201", []))
    found = [_summarise(rule, alerts, biased) for rule, alerts in by_rule.items()]
    return sorted(found, key=_order)


def _order(finding: FindingSummary) -> tuple[int, int, str]:
    inputs = _INPUTS_FIRST.index(finding.rule) if finding.rule in _INPUTS_FIRST else len(_INPUTS_FIRST)
    return -SEVERITIES.index(finding.severity), inputs, finding.rule


def _alerts(run: Run) -> Iterable[AlertRecord]:
    """The alerts on record, and what the rules say of steps without one (a run that died before it judged them)."""
    yield from run.alerts
    known = {(a.rule, a.step, a.rank) for a in run.alerts}
    thresholds = Thresholds.from_settings(run.info.settings if run.info is not None else {})
    for record in run.steps:
        for alert in evaluate(record, thresholds, on_error=lambda code, error: None):
            if (alert.rule, alert.step, alert.rank) not in known:
                yield alert
    for note in run.notes:
        yield _as_alert("DS901", note.step, note_finding(note))
    refused = refused_finding(run.info) if run.info is not None else None
    if refused is not None:
        yield _as_alert("DS111", 0, refused)


def _as_alert(rule: str, step: int, finding: Finding) -> AlertRecord:
    return AlertRecord(
        step=step,
        rule=rule,
        severity=finding.severity,
        title=finding.title,
        evidence=finding.evidence,
        remedy=finding.remedy,
    )


def _summarise(rule: str, alerts: list[AlertRecord], biased: bool) -> FindingSummary:
    worst = max(alerts, key=lambda a: SEVERITIES.index(a.severity))  # the first of the worst
    return FindingSummary(
        rule=rule,
        severity=worst.severity,
        title=worst.title,
        evidence=worst.evidence,
        remedy=honest_ratio_first(worst.remedy) if biased else worst.remedy,
        first_step=min(a.step for a in alerts),
        count=len({(a.step, a.rank) for a in alerts}),
    )
