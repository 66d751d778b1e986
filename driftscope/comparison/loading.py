"""One run read, judged and reduced to what a comparison needs; the only place that touches its records."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any

from driftscope._journal_reader import RECORDS_NAME, Run
from driftscope._run_facts import Facts, gather
from driftscope.comparison.figures import DRAWN, FIGURES, Figure, Getter, attributed, cause_figure
from driftscope.comparison.model import RuleFound, RunColumn, Series
from driftscope.comparison.sampling import sample
from driftscope.reading import read_any
from driftscope.records import RunInfo, StepRecord
from driftscope.rules.base import finite
from driftscope.verdict import NOT_JUDGED, judge

JUDGED_POINTS = 2048
DRAWN_POINTS = 400
OF_THE_RUN = ("run_dir",)  # where a run is kept is no difference between two
SECTIONS = ("Versions and device", "Model", "Trainer", "Configured loss", "Driftscope")


def load(path: Path) -> RunColumn:
    """Read and judge the run at ``path`` (a run directory or its records file); its records are let go.

    Raises ``RecordError`` for a run that cannot be read.
    """
    run = read_any(path)
    verdict = judge(run)
    if isinstance(run, Run):
        facts, steps, records = gather(run.steps), run.steps, len(run.steps)
        measured_steps = len({s.step for s in steps if s.tier != "light"})
    else:  # too long to be held: evenly spaced windows stand for its series
        found = sample(run.path, JUDGED_POINTS)
        facts, steps, records, measured_steps = run.facts, found.steps, run.records, found.measured
    series = _series(steps, _figures(facts))
    drawn = {name: _by_step(steps, get) for name in DRAWN if (get := _getter(name)) is not None}
    positive = {name: _positive(line) for name, line in drawn.items()}
    path = Path(path)
    return RunColumn(
        path=path,
        label=run_label(path),
        run_id=run.info.run_id if run.info is not None else None,
        status=run.info.status if run.info is not None else None,
        level=verdict.level,
        headline=verdict.headline,
        records=records,
        first_step=min((s.step for s in steps), default=None),
        last_step=max((s.step for s in steps), default=None),
        measured_steps=measured_steps,
        processes=_processes(steps, run.info),
        live=facts.live if facts is not None else None,
        pair=_pair(facts),
        findings=tuple(
            RuleFound(f.rule, f.severity, f.title, f.first_step, f.count, f.rule not in NOT_JUDGED)
            for f in verdict.findings
        ),
        series={name: _evenly(found) for name, found in series.items() if found},
        lines={name: thin(line) for name, line in positive.items() if line},
        dropped={name: n for name in drawn if (n := len(drawn[name]) - len(positive[name]))},
        scalars=_scalars(steps, records, _processes(steps, run.info), facts),
        attributed=_evenly(_by_step(steps, lambda s: 1.0 if attributed(s) else None)).steps,
        settings=_settings(run.info),
        unavailable=dict(facts.unavailable) if facts is not None else {},
        problems=tuple(run.problems),
    )


def run_label(path: Path, parts: int = 1) -> str:
    """The last ``parts`` names of the run's directory; a file of another name than records.jsonl counts as one."""
    whole = Path(path).absolute()
    if whole.name == RECORDS_NAME:
        whole = whole.parent
    names = [name for name in whole.parts if name != whole.anchor]
    return "/".join(names[-parts:]) or str(whole)


def _figures(facts: Facts | None) -> list[Figure]:
    """The figures that this run can have: those of every run, and the factors of its own causes."""
    return [*FIGURES, *(cause_figure(name) for name in (facts.causes if facts is not None else {}))]


def _getter(name: str) -> Getter | None:
    return next((f.get for f in FIGURES if f.id == name), None)


def _series(steps: list[StepRecord], figures: Iterable[Figure]) -> dict[str, Series]:
    return {f.id: _by_step(steps, f.get) for f in figures if f.get is not None}


def _by_step(steps: list[StepRecord], get: Getter) -> Series:
    """The median of each step's finite values, in the order of steps."""
    groups: dict[int, list[float]] = defaultdict(list)
    for record in steps:
        value = finite(get(record))
        if value is not None:
            groups[record.step].append(value)
    order = sorted(groups)
    return Series(tuple(order), tuple(float(median(groups[step])) for step in order))


def _evenly(series: Series, limit: int = JUDGED_POINTS) -> Series:
    """Every n-th step, so that at most ``limit`` stay: which ones stay does not depend on the values."""
    stride = -(-len(series) // limit)
    return series if stride <= 1 else Series(series.steps[::stride], series.values[::stride])


def _positive(series: Series) -> Series:
    known = [v > 0 for v in series.values]
    return Series(tuple(compress(series.steps, known)), tuple(compress(series.values, known)))


def thin(series: Series, limit: int = DRAWN_POINTS) -> Series:
    """At most about ``limit`` points; of each stretch its lowest and its highest value stay."""
    n = len(series)
    if n <= limit:
        return series
    buckets = max(1, (limit - 2) // 2)
    keep = {0, n - 1}
    for b in range(buckets):
        where = range(b * n // buckets, (b + 1) * n // buckets)
        keep.add(min(where, key=series.values.__getitem__))
        keep.add(max(where, key=series.values.__getitem__))
    order = sorted(keep)
    return Series(tuple(series.steps[i] for i in order), tuple(series.values[i] for i in order))


def _processes(steps: list[StepRecord], info: RunInfo | None) -> int | None:
    """Processes of the run, as its ranks reported them, else as its configured loss has them."""
    reported = [s.ranks.processes for s in steps if s.ranks is not None]
    if reported:
        return max(reported)
    spec = info.spec.get("num_processes") if info is not None else None
    return spec if isinstance(spec, int) and not isinstance(spec, bool) else None


def _pair(facts: Facts | None) -> tuple[str, str] | None:
    if facts is None or facts.candidate is None or facts.reference is None:
        return None
    return facts.candidate, facts.reference


def _scalars(steps: list[StepRecord], records: int, processes: int | None, facts: Facts | None) -> dict[str, float]:
    timed = [(s.overhead_ms, t) for s in steps if s.tier != "light" and (t := finite(s.step_ms)) is not None]
    whole = sum(t for _, t in timed)
    spent = [v for s in steps if s.cadence is not None and (v := finite(s.cadence.spent)) is not None]
    floors = [v for s in steps if s.gap is not None and (v := finite(s.gap.noise_floor)) is not None]
    found: dict[str, float | None] = {
        "steps": max((s.step for s in steps), default=None),
        "records": records,
        "processes": processes,
        "worst_gap": finite(facts.worst_gap) if facts is not None else None,
        "overhead": sum(cost for cost, _ in timed) / whole if whole > 0 else None,
        "spent": spent[-1] if spent else None,
        "noise_floor": median(floors) if floors else None,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _settings(info: RunInfo | None) -> dict[str, dict[str, str]]:
    if info is None:
        return {}
    own = {k: v for k, v in info.settings.items() if k not in OF_THE_RUN}
    stack: dict[str, Any] = {k: v or "not installed" for k, v in info.versions.items()}
    parts = (stack | {"driftscope": info.driftscope, "device": info.device}, info.model, info.trainer, info.spec, own)
    return {section: _flat(part) for section, part in zip(SECTIONS, parts, strict=True)}


def _flat(data: object, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted name -> text; numbers that are equal have equal texts."""
    if isinstance(data, dict) and (data or not prefix):
        return {
            name: text
            for key in data
            for name, text in _flat(data[key], f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: _text(data)}


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
