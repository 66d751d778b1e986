"""What the template is given: the run as words, tiles, panels, tables and groups. No HTML here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftscope.dashboards import figures, tables
from driftscope.dashboards.figures.ratio_time import ratio_value
from driftscope.dashboards.glossary import GLOSSARY
from driftscope.dashboards.mismatch_view import drift_section
from driftscope.dashboards.series import finite, middle, pair, values
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
from driftscope.records import SEVERITIES, AlertRecord, RunInfo, StepRecord

if TYPE_CHECKING:
    from driftscope.journal import Run
    from driftscope.verdict import Verdict

LEVEL_WORDS = {
    "clean": "No finding",
    "info": "For your information",
    "warning": "Warning",
    "critical": "Critical",
    "unavailable": "No verdict",
}
SHOWN_PER_RULE = 6


@dataclass(frozen=True)
class Tile:
    """One number at a glance."""

    label: str
    value: str
    hint: str


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


def build(run: Run, verdict: Verdict) -> dict[str, Any]:
    """The whole context of the template, a pure function of its arguments."""
    steps = run.steps
    settings = run.info.settings if run.info else {}
    return {
        "info": run.info,
        "verdict": verdict,
        "level_words": LEVEL_WORDS.get(verdict.level, verdict.level),
        "subtitle": _subtitle(run),
        "tiles": tiles(steps),
        "panels": panels(steps, settings),
        "drift": drift_section(steps, run.alerts),
        "path_table": tables.path_table(steps),
        "cost_table": tables.cost_table(steps),
        "cause_table": tables.cause_table(figures.summarize_causes(steps)),
        "ratio_table": tables.ratio_table(steps),
        "ratio_causes_table": tables.ratio_causes_table(steps),
        "ledger_table": tables.ledger_table(steps),
        "rules": rule_groups(run, verdict),
        "refused": [{k: clean(v) for k, v in r.items()} for r in run.info.refused] if run.info else [],
        "setups": setups(run.info),
        "troubles": troubles(run),
        "glossary": GLOSSARY,
    }


def _subtitle(run: Run) -> str:
    parts = []
    if run.info:
        parts += [f"Run {clean(run.info.run_id)}", f"started {utc(run.info.created)}"]
        parts.append({"running": "still running", "failed": "failed"}.get(run.info.status, run.info.status))
    if run.steps:
        measured = len({s.step for s in run.steps})
        parts.append(
            f"{count(measured, 'step')} and {count(len(run.steps), 'micro-batch', 'micro-batches')} on record"
        )
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
    ratios = values(steps, lambda s: s.gap.grad_norm_ratio if s.gap else None)
    span = f", {number(min(ratios))} to {factor(max(ratios))}" if ratios else ""
    spent = sum(values(steps, lambda s: s.overhead_ms if s.step_ms is not None else None))
    whole = sum(values(steps, lambda s: s.step_ms))
    applied = middle(steps, ratio_value("applied", "mean"))
    return [
        Tile("Gap in gradient norm", factor(middle(steps, lambda s: s.gap.grad_norm_ratio if s.gap else None)),
             f"{candidate} / {reference}; median{span}" if ratios else "no two paths were compared"),
        Tile("Importance sampling ratio", number(applied),
             "mean as applied; 1 is agreement" if applied is not None else "no ratio on record"),
        Tile("Gradient norm reported", number(middle(steps, lambda s: s.live_grad_norm)), "by the trainer, all "
        "parameters; median"),
        Tile("Residual", number(middle(steps, lambda s: s.residual)), "of the live gradient; median"),
        Tile("Driftscope's cost", percent(spent / whole) if whole > 0 else UNAVAILABLE,
             "of step time, on the micro-batches it analysed" if whole > 0 else "no step time on record"),
    ]  # fmt: skip


def rule_groups(run: Run, verdict: Verdict) -> list[RuleGroup]:
    """Alerts by rule, the most severe first; findings of the verdict that have no alert of their own included."""
    grouped: dict[str, list[AlertRecord]] = defaultdict(list)
    for alert in run.alerts:
        grouped[alert.rule].append(alert)
    groups = [_group(rule, alerts) for rule, alerts in grouped.items()]
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


def _group(rule: str, alerts: list[AlertRecord]) -> RuleGroup:
    worst = max(alerts, key=lambda a: (SEVERITIES.index(a.severity), a.step))
    shown = (
        alerts if len(alerts) <= SHOWN_PER_RULE else [*alerts[: SHOWN_PER_RULE // 2], *alerts[-SHOWN_PER_RULE // 2 :]]
    )
    when = f"{count(len(alerts), 'alert')}, {step_span(a.step for a in alerts)}"
    examples: list[tuple[str, str, str]] = [
        (a.severity, f"step {a.step}" + (f", rank {a.rank}" if a.rank else ""), clean(a.evidence)) for a in shown
    ]
    return RuleGroup(
        clean(rule),
        worst.severity,
        clean(worst.title),
        when,
        clean(worst.remedy),
        rule_page(rule),
        examples,
        len(alerts) - len(shown),
    )


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
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for note in run.notes:
        seen[clean(note.stage), clean(note.message)].append(note.step)
    for record in run.steps:
        for signal in sorted(record.unavailable):
            seen[clean(signal), "Unavailable: " + clean(record.unavailable[signal])].append(record.step)
        for name in record.nonfinite:
            seen[clean(name), "Not a finite number (NaN or infinite)."].append(record.step)
    rows = [("records", clean(problem), "") for problem in run.problems]
    return rows + [
        (where, what, f"{count(len(when), 'time')}, {step_span(when)}" if len(when) > 1 else step_span(when))
        for (where, what), when in seen.items()
    ]
