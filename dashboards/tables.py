"""The report's tables as plain rows of text, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from driftscope.dashboards.figures.causes import CauseSummary
from driftscope.dashboards.figures.ratio_time import ratio_value
from driftscope.dashboards.series import extremes, getter, middle, path_value, paths_in, whole_of
from driftscope.dashboards.wording import (
    PATH_ORDER,
    UNAVAILABLE,
    clean,
    factor,
    number,
    ordered_paths,
    path_label,
    percent,
)
from driftscope.records import RatioStats, StepRecord

WINDOWS = 3


@dataclass(frozen=True)
class Table:
    """A table: ``numeric`` holds the columns that are set right-aligned."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    numeric: set[int] = field(default_factory=set)


def path_table(steps: Sequence[StepRecord]) -> Table | None:
    """Every loss path in a row: medians over the micro-batches of the run."""
    whole = whole_of(steps)
    live = {s.live for s in steps} if whole is None else whole.whole.live
    rows = []
    for path in paths_in(steps) if whole is None else ordered_paths(whole.whole.paths):
        if whole is None:
            notes = [n for s in steps if (p := s.paths.get(path)) is not None and (n := p.note)]
            known = {str(s.paths[path].source) for s in steps if path in s.paths}
        else:
            known = whole.whole.paths[path].sources
            notes = [n] if (n := whole.whole.paths[path].note) else []
        sources = sorted(source.replace("_", " ") for source in known)
        rows.append(
            [
                path_label(path) + (", trains" if path in live else ""),
                *(number(middle(steps, path_value(path, f))) for f in ("loss", "hidden_grad_norm", "param_grad_norm")),
                number(middle(steps, path_value(path, "normalizer")), 4),
                number(middle(steps, path_value(path, "normalizer_measured")), 4),
                number(middle(steps, path_value(path, "coef_error"))),
                "; ".join([", ".join(sources), *([clean(notes[-1])] if notes else [])]),
            ]
        )
    if not rows:
        return None
    columns = [
        "Path", "Loss", "Hidden gradient norm", "Parameter gradient norm", "Normaliser, claimed", "Normaliser, "
        "measured",
        "Coefficient error against the oracle", "How it is known",
    ]  # fmt: skip
    return Table("The loss paths side by side: medians over all micro-batches", columns, rows, set(range(1, 7)))


def cost_table(steps: Sequence[StepRecord]) -> Table | None:
    """What each path's head and loss cost on the run's own batches, and whether the path is right."""
    deep = [s for s in steps if s.profile]
    whole = whole_of(steps)
    rows = []
    for path in (p for p in PATH_ORDER if any(p in s.profile for s in deep)):
        costs = [s.profile[path] for s in deep if path in s.profile]
        error = middle(steps, path_value(path, "coef_error"))
        trains = any(s.live == path for s in deep) if whole is None else whole.whole.paths[path].trains_deep
        note = next((c.note for c in costs if c.note), "") if whole is None else whole.whole.paths[path].cost_note
        peaks = extremes(steps, getter("profile", path, "peak_bytes"))
        rows.append(
            [
                path_label(path) + (", trains" if trains else ""),
                number(middle(steps, getter("profile", path, "time_ms"))),
                f"{peaks[1] / 2**30:.2f} GiB" if peaks is not None else UNAVAILABLE,
                number(error),
                UNAVAILABLE if error is None else "yes" if error <= _right_within(steps) else "no",
                clean(note or ""),
            ]
        )
    if not rows:
        return None
    caption = "What each path costs, and whether it is right: head, loss and their backward on the run's own batches"
    columns = ["Path", "Time, ms (median)", "Peak memory", "Error against the oracle", "Right", "Note"]
    return Table(caption, columns, rows, {1, 2, 3})


def _right_within(steps: Sequence[StepRecord]) -> float:
    """The relative error that rounding alone may make in this run: four times the measured noise floor."""
    floors = extremes(steps, getter("gap.noise_floor"))
    return max(1e-4, 4 * floors[1] if floors is not None else 0.0)


def cause_table(rows: Sequence[CauseSummary]) -> Table | None:
    """The causes of the gap, the largest first."""
    if not rows:
        return None
    body = [
        [
            row.label, factor(row.factor), UNAVAILABLE if row.low is None else f"{factor(row.low)} to "
            f"{factor(row.high)}",
            percent(row.share), f"{row.seen:,}", clean(row.detail or ""),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["Cause", "Factor, median", "Range", "Share of the gap", "Micro-batches", "Detail"]
    return Table("Causes of the gap between candidate and reference", columns, body, {1, 2, 3, 4})


def ratio_causes_table(steps: Sequence[StepRecord]) -> Table | None:
    """Why the importance sampling ratio is what it is, from the latest record that says so."""
    record = next((s for s in reversed(steps) if s.is_ratio and s.is_ratio.causes), None)
    if record is None or record.is_ratio is None:
        return None
    from driftscope.dashboards.wording import cause_label

    body = [
        [cause_label(c.id), factor(c.factor), percent(c.share), clean(c.detail or "")] for c in record.is_ratio.causes
    ]
    caption = f"What makes the ratio differ from 1 (step {record.step}, micro-batch {record.micro_step + 1})"
    return Table(caption, ["Cause", "Factor", "Share", "Detail"], body, {1, 2})


def ratio_table(steps: Sequence[StepRecord]) -> Table | None:
    """The raw and the applied ratio in numbers: medians over micro-batches."""
    rows = []
    for which, name in (("raw_token", "Raw, per token"), ("raw", "Raw"), ("applied", "Applied by the loss")):
        stats = _latest(steps, which)
        if stats is None:
            continue
        unit = stats.level if which != "raw_token" else "token"
        get = [middle(steps, ratio_value(which, f)) for f in ("mean", "min", "p50", "max")]
        shares = [percent(middle(steps, ratio_value(which, f))) for f in ("share_capped", "share_masked", "ess")]
        rows.append([name, f"per {unit}", *map(number, get), *shares])
    if not rows:
        return None
    columns = ["Ratio", "Level", "Mean", "Min", "Median", "Max", "At the cap", "Masked", "Effective sample size"]
    return Table("Importance sampling ratio: medians over all micro-batches", columns, rows, set(range(2, 9)))


def _latest(steps: Sequence[StepRecord], which: str) -> RatioStats | None:
    found = (getattr(s.is_ratio, which) for s in reversed(steps) if s.is_ratio is not None)
    return next((stats for stats in found if stats is not None), None)


def ledger_table(steps: Sequence[StepRecord]) -> Table | None:
    """The normalisers of the last windows, micro-batch by micro-batch: claimed, measured, intended."""
    known = [
        s
        for s in steps
        if any(p.normalizer is not None or p.normalizer_measured is not None for p in s.paths.values())
    ]
    if not known:
        return None
    rank = min(s.rank for s in known)
    last = sorted({s.step for s in known if s.rank == rank})[-WINDOWS:]
    records = sorted((s for s in known if s.rank == rank and s.step in last), key=lambda s: (s.step, s.micro_step))
    paths = [p for p in paths_in(records) if p != "oracle"]
    columns = ["Step", "Micro-batch", "Trained tokens", "Intended (oracle)"]
    for path in paths:
        columns += [f"{path_label(path)}, claimed", f"{path_label(path)}, measured"]
    body = []
    for s in records:
        intended = s.paths["oracle"].normalizer if "oracle" in s.paths else None
        row = [f"{s.step:,}", _micro(s), UNAVAILABLE if s.tokens is None else f"{s.tokens:,}", number(intended, 4)]
        for path in paths:
            p = s.paths.get(path)
            row += [number(p.normalizer if p else None, 4), number(p.normalizer_measured if p else None, 4)]
        body.append(row)
    return Table("The last accumulation windows, micro-batch by micro-batch", columns, body, set(range(len(columns))))


def _micro(record: StepRecord) -> str:
    position = f"{record.micro_step + 1}"
    return f"{position} of {record.accumulation}" if record.accumulation else position


def flat(data: object, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as sorted (dotted name, text) pairs."""
    if isinstance(data, dict):
        pairs = [
            pair
            for key in sorted(data, key=str)
            for pair in flat(data[key], f"{prefix}.{key}" if prefix else str(key))
        ]
        return pairs or ([(clean(prefix), "(empty)")] if prefix else [])
    if isinstance(data, (list, tuple)):
        text = ", ".join(str(item) for item in data) or "(empty)"
    else:
        text = {None: "none", True: "yes", False: "no"}[data] if data is None or isinstance(data, bool) else str(data)
    return [(clean(prefix), clean(text))]
