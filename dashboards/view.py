"""What the template is given: the run as words, tiles, panels, tables and groups. No HTML here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftscope.dashboards import figures, tables
from driftscope.dashboards.figures.ratio_time import ratio_value
from driftscope.dashboards.glossary import GLOSSARY
from driftscope.dashboards.mismatch_view import drift_section
from driftscope.dashboards.process_view import budget_tile, processes_section
from driftscope.dashboards.series import Thinned, extremes, finite, getter, middle, pair, total, whole_of
from driftscope.dashboards.tiles import Tile
from driftscope.dashboards.wording import (
    UNAVAILABLE,
    clean,
    count,
    factor,
    number,
    path_label,
    percent,
    rule_page,
    step_span,
    utc,
)
from driftscope.reading.alerts import Alerts, RuleTally
from driftscope.reading.columns import STRETCHES
from driftscope.reading.events import Troubles
from driftscope.records import SEVERITIES, RunInfo, StepRecord

if TYPE_CHECKING:
    from driftscope.journal import Run
    from driftscope.reading.summary import Summary
    from driftscope.verdict import Verdict

LEVEL_WORDS = {
    "clean": "No finding",
    "info": "For your information",
    "warning": "Warning",
    "critical": "Critical",
    "unavailable": "No verdict",
}


@dataclass(frozen=True)
class RuleGroup:
    """All alerts of one rule."""

    rule: str
    severity: str
    title: str
    when: str
    remedy: str
    page: str
    examples: list[tuple[str, str, str]]  # severity, when, evidence
    omitted: int


def build(run: Run | Summary, verdict: Verdict) -> dict[str, Any]:
    """The whole context of the template, a pure function of its arguments (and of the file that a summary is of)."""
    run = shown(run)
    steps = run.steps
    settings = run.info.settings if run.info else {}
    return {
        "info": run.info,
        "verdict": verdict,
        "level_words": LEVEL_WORDS.get(verdict.level, verdict.level),
        "subtitle": _subtitle(run),
        "thinned": thinned_words(steps),
        "tiles": tiles(steps),
        "panels": panels(steps, settings),
        "drift": drift_section(steps, run.alerts),
        "path_table": tables.path_table(steps),
        "cost_table": tables.cost_table(steps),
        "cause_table": tables.cause_table(figures.summarize_causes(steps)),
        "ratio_table": tables.ratio_table(steps),
        "ratio_causes_table": tables.ratio_causes_table(steps),
        "ledger_table": tables.ledger_table(steps),
        "processes": processes_section(steps),
        "alarms": alarms_panel(steps),
        "rules": rule_groups(run, verdict),
        "refused": [{k: clean(v) for k, v in r.items()} for r in run.info.refused] if run.info else [],
        "setups": setups(run.info),
        "troubles": troubles(run),
        "glossary": GLOSSARY,
    }


def shown(run: Run | Summary) -> Run:
    """A run as the report shows it: itself, or the kept records of one that was only summed up."""
    from driftscope.journal import Run

    if isinstance(run, Run):
        return run
    return Run(run.info, Thinned(run), run.kept_alerts(), run.notes, run.problems)


def thinned_words(steps: Sequence[StepRecord]) -> str | None:
    """What is not drawn of a long run, or ``None`` where everything is."""
    whole = whole_of(steps)
    if whole is None or len(steps) >= whole.records:
        return None
    return (
        f"A long run: the lines are drawn through {len(steps):,} of its {count(whole.records, 'record')}. Of every "
        f"line the lowest and the highest value of each of {STRETCHES} stretches of the run are among them, and the "
        "first and last alerts of every rule; every alert is counted below. Counts, extremes and sums are of all "
        "records; so are medians, within 0.05%."
    )


def alarms_panel(steps: Sequence[StepRecord]) -> figures.Panel | None:
    """The alerts of a long run by rule over time; a short one shows them one by one."""
    whole = whole_of(steps)
    return figures.alarms(whole.alerts) if whole is not None and len(steps) < whole.records else None


def _subtitle(run: Run) -> str:
    parts = []
    if run.info:
        parts += [f"Run {clean(run.info.run_id)}", f"started {utc(run.info.created)}"]
        parts.append({"running": "still running", "failed": "failed"}.get(run.info.status, run.info.status))
    if run.steps:
        whole = whole_of(run.steps)
        measured, records = (len({s.step for s in run.steps}), len(run.steps)) if whole is None else (
            whole.steps, whole.records)  # fmt: skip
        parts.append(f"{count(measured, 'step')} and {count(records, 'micro-batch', 'micro-batches')} on record")
    else:
        parts.append("no step on record")
    return " · ".join(parts)


def panels(steps: Sequence[StepRecord], settings: dict[str, Any]) -> dict[str, figures.Panel]:
    """Every figure of the report by its id."""
    limits = {k: _threshold(settings.get(f"gap_{k}"), d) for k, d in (("warning", 1.5), ("critical", 10.0))}
    makers: list[Callable[[Sequence[StepRecord]], figures.Panel]] = [
        figures.grad_norm, figures.loss, lambda s: figures.gap(s, **limits), figures.scatter, figures.causes,
        figures.ratio_time, figures.ratio_distribution, figures.normalizer, figures.residual,
    ]  # fmt: skip
    return {panel.id: panel for panel in (make(steps) for make in makers)}


def _threshold(value: object, default: float) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and finite(value) is not None
    return float(value) if known and value > 1 else default  # type: ignore[operator,arg-type]


def tiles(steps: Sequence[StepRecord]) -> list[Tile]:
    """The run in five numbers; a dash and the reason where one could not be had."""
    candidate, reference = (path_label(p) for p in pair(steps))
    ratios = extremes(steps, getter("gap.grad_norm_ratio"))
    span = f", {number(ratios[0])} to {factor(ratios[1])}" if ratios is not None else ""
    timed = (lambda s: s.overhead_ms if s.step_ms is not None else None) if whole_of(steps) is None else getter(
        "overhead_ms")  # fmt: skip
    spent, whole = total(steps, timed), total(steps, getter("step_ms"))
    applied = middle(steps, ratio_value("applied", "mean"))
    return [
        Tile("Gap in gradient norm", factor(middle(steps, getter("gap.grad_norm_ratio"))),
             f"{candidate} / {reference}; median{span}" if ratios else "no two paths were compared"),
        Tile("Importance sampling ratio", number(applied),
             "mean as applied; 1 is agreement" if applied is not None else "no ratio on record"),
        Tile("Gradient norm reported", number(middle(steps, getter("live_grad_norm"))), "by the trainer, all "
        "parameters; median"),
        Tile("Residual", number(middle(steps, getter("residual"))), "of the live gradient; median"),
        *budget_tile(steps),
        Tile("Driftscope's cost", percent(spent / whole) if whole > 0 else UNAVAILABLE,
             "of step time, on the micro-batches it analysed" if whole > 0 else "no step time on record"),
    ]  # fmt: skip


def rule_groups(run: Run, verdict: Verdict) -> list[RuleGroup]:
    """Alerts by rule, the most severe first; findings of the verdict that have no alert of their own included."""
    whole = whole_of(run.steps)
    if whole is None:
        alerts = Alerts()
        for alert in run.alerts:
            alerts.add(alert)
    else:
        alerts = whole.alerts
    grouped = alerts.rules
    groups = [_group(rule, tally) for rule, tally in grouped.items()]
    for f in verdict.findings:
        if f.rule not in grouped:
            when = f"{count(f.count, 'time')}, first at step {f.first_step}"
            example: list[tuple[str, str, str]] = [(f.severity, f"step {f.first_step}", clean(f.evidence))]
            groups.append(
                RuleGroup(
                    clean(f.rule), f.severity, clean(f.title), when, clean(f.remedy), rule_page(f.rule), example, 0
                )
            )
    return sorted(groups, key=lambda g: (-SEVERITIES.index(g.severity), g.rule))


def _group(rule: str, tally: RuleTally) -> RuleGroup:
    worst, examples = tally.last_worst, tally.shown()
    when = f"{count(tally.count, 'alert')}, {step_span((tally.first_step, tally.last_step))}"
    rows: list[tuple[str, str, str]] = [
        (a["severity"], f"step {a['step']}" + (f", rank {a['rank']}" if a.get("rank") else ""), clean(a["evidence"]))
        for a in examples
    ]
    return RuleGroup(
        clean(rule), worst["severity"], clean(worst["title"]), when, clean(worst["remedy"]), rule_page(rule), rows,
        tally.count - len(examples),
    )  # fmt: skip


def setups(info: RunInfo | None) -> list[tuple[str, list[tuple[str, str]]]]:
    """Versions and settings as titled lists of (name, value)."""
    if info is None:
        return []
    head = {
        "driftscope": info.driftscope,
        "device": info.device or "unknown",
        "run id": info.run_id,
        "status": info.status,
    }
    head |= {"started": utc(info.created), "ended": utc(info.finished)}
    versions = {name: version or "not installed" for name, version in info.versions.items()}
    parts: list[tuple[str, object]] = [
        ("Run", head), ("Versions of the stack", versions), ("Model", info.model), ("Trainer settings that the "
        "loss reads", info.trainer),
        ("The loss as configured", info.spec), ("Driftscope's settings", info.settings),
    ]  # fmt: skip
    return [(title, tables.flat(data)) for title, data in parts if data]


def troubles(run: Run) -> list[tuple[str, str, str]]:
    """What Driftscope could not do or see, gathered: (where, what, when)."""
    whole = whole_of(run.steps)
    found = Troubles()
    for note in run.notes:
        found.add(note.stage, note.message, note.step)
    if whole is not None:
        found.merge(whole.whole.troubles)
    for record in run.steps if whole is None else ():
        found.add_record(record.unavailable, record.nonfinite, record.step)
    rows = [("records", clean(problem), "") for problem in run.problems]
    if found.left_out:
        rows.append(("records", f"{count(found.left_out, 'further sort')} of trouble not listed.", ""))
    return rows + [
        (clean(where), clean(what), f"{count(times, 'time')}, {span}" if times > 1 else span)
        for (where, what), (times, first, last) in found.seen.items()
        for span in [step_span((first, last))]
    ]
