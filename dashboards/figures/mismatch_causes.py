"""What the log importance sampling ratio is made of, step by step, and how large it is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import AMBER, COLORS, GREY, Panel, dropped_note, label, set_log, step_axis
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.figures.rows import axes_of, name, new_rows
from driftscope.dashboards.series import (
    Getter,
    Line,
    by_step,
    finite,
    getter,
    middle,
    thin_together,
    whole_of,
    why_unavailable,
)
from driftscope.dashboards.wording import cause_label, number, percent
from driftscope.records import StepRecord

ID, TITLE = "mismatch-causes", "What the log ratio is made of"
NOT_TAKEN_APART = "not taken apart"
TONES = {
    "truncated_support": COLORS["liger"],
    "temperature": "#c9a227",
    "stale_weights": "#c23b4b",
    "stale_module": "#b5539c",
    "adapter_missing": COLORS["oracle"],
    "engine_noise": COLORS["reference"],
    NOT_TAKEN_APART: GREY,
}
OTHER = "#3a98a5"
NOT_A_PART = frozenset({"sequence_product"})  # it works on the ratio, not in a token's log ratio
TOLD = 0.005
"""Negative shares from this size on are mentioned; below it they are rounding."""


def mismatch_causes(steps: Sequence[StepRecord]) -> Panel:
    """Shares of the causes as a stacked band, and below it the size of the mismatch beside the noise floor.

    Records in which the canary looked are shown; where there is none, those with any cause, what they leave open
    marked as such. Shares of a step are means over its micro-batches.
    """
    looked = [s for s in steps if s.canary is not None and s.is_ratio is not None and s.is_ratio.causes]
    records = looked or [s for s in steps if s.is_ratio is not None and s.is_ratio.causes]
    shares = [_shares(s) for s in records]
    at = sorted({s.step for s, found in zip(records, shares, strict=True) if found})
    if not at:
        why = why_unavailable(steps, "canary", "kept_mass", "is_ratio")
        return Panel.missing(ID, TITLE, why or "no record takes the ratio between trainer and engine apart.")
    by_look: dict[int, list[dict[str, float]]] = {step: [] for step in at}
    for record, found in zip(records, shares, strict=True):
        if found:
            by_look[record.step].append(found)
    rows = {step: _mean(found) for step, found in by_look.items()}
    ids = sorted({i for row in rows.values() for i in row}, key=_order)
    shown, clipped = {}, 0
    for step, row in rows.items():
        clipped += any(v < -TOLD for v in row.values())
        positive = {i: max(v, 0.0) for i, v in row.items()}
        shown[step] = {i: v / sum(positive.values()) for i, v in positive.items()}
    size = {n: by_step(looked, get, log=True) for n, get in SIZES.items()}
    sized = not size["log ratio"].empty
    figure = new_rows(["share of the log ratio", "nats a token (rms)"][: 1 + sized], [1.5, 1][: 1 + sized])
    _bands(figure, at, ids, shown, rows)
    figure.layout.yaxis.update(range=[0, 1], tickformat=".0%")
    if sized:
        _sizes(figure, size)
    edges = [at[0] - _reach(at, 0), at[-1] + _reach(at, len(at) - 1)]
    step_axis(figure, edges if len(at) > 1 else at)
    if sized:
        figure.layout.xaxis2.update({k: v for k, v in figure.layout.xaxis.to_plotly_json().items() if k in _TICKS})
    words = ", ".join(f"{cause_label(i)} {percent(_typical(rows, i))}" for i in ids)
    typical = middle(looked if whole_of(steps) is None else steps, SIZES["log ratio"])
    return Panel(
        id=ID, title=TITLE, figure=figure, height=520 if sized else 340,
        caption="The log ratio of a token is the trainer's log-prob minus the engine's. Each known difference "
        "between the two makes a part of it; engine noise is what none of them explains."
        + (" Below, how large the whole is, beside what the trainer differs from itself by: near that floor the "
           "shares above are shares of rounding." if sized else "")
        + _clip_words(clipped, len(at)) + dropped_note(size.values()) + _product_words(records),
        alt=f"Stacked shares of the log ratio by cause over the steps; means: {words}."
        + (f" Its size: median {number(typical)} nats a token." if sized else ""),
    )  # fmt: skip


_TICKS = ("range", "tickformat", "dtick")
SIZES: dict[str, Getter] = {
    "log ratio": getter("canary.rms"),
    "engine noise": getter("canary.rest_rms"),
    "noise floor": getter("canary.noise_floor"),
    "bfloat16 noise": getter("canary.bf16_noise"),
}


def _shares(record: StepRecord) -> dict[str, float]:
    """Share by cause; the remainder as engine noise, or as not taken apart where the canary did not look."""
    if record.is_ratio is None:
        return {}
    found: dict[str, float] = {}
    for cause in record.is_ratio.causes:
        share = finite(cause.share)
        if cause.id not in NOT_A_PART and share is not None:
            found[cause.id] = found.get(cause.id, 0.0) + share
    if not found:
        return {}
    rest = 1 - sum(found.values())
    if "engine_noise" not in found:
        found[NOT_TAKEN_APART if record.canary is None else "engine_noise"] = rest
    return found


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {i: fmean(row.get(i, 0.0) for row in rows) for i in sorted({i for row in rows for i in row})}


def _typical(rows: dict[int, dict[str, float]], cause: str) -> float:
    return fmean(max(row.get(cause, 0.0), 0.0) for row in rows.values())


def _order(cause: str) -> tuple[int, str]:
    known = list(TONES)
    return (known.index(cause) if cause in known else len(known) - 3, cause)


def _reach(at: Sequence[int], i: int) -> float:
    """Half the distance to the nearest neighbour: how far the value of look ``i`` is drawn to its sides."""
    near = [abs(at[j] - at[i]) for j in (i - 1, i + 1) if 0 <= j < len(at)]
    return min(near) / 2 if near else 0.5


def _bands(
    figure: go.Figure,
    at: list[int],
    ids: list[str],
    shown: dict[int, dict[str, float]],
    rows: dict[int, dict[str, float]],
) -> None:
    """Bands with a flat top around each look, so that a single look is seen too."""
    lines = [[shown[step].get(cause, 0.0) for step in at] for cause in ids]
    thinned = thin_together([Line(list(map(float, at)), [*v], [*v], [*v]) for v in lines])
    kept = [int(x) for x in thinned[0].x]
    edges: list[float] = []
    for i, step in enumerate(kept):
        left = kept[i - 1] if i else None
        right = kept[i + 1] if i + 1 < len(kept) else None
        edges += [
            (left + step) / 2 if left is not None else step - _reach(kept, i),
            (step + right) / 2 if right is not None else step + _reach(kept, i),
        ]
    for cause, line in zip(ids, thinned, strict=True):
        tone = TONES.get(cause, OTHER)
        text = label(cause_label(cause))
        figure.add_trace(
            go.Scatter(
                x=edges, y=[v for v in line.mid for _ in (0, 1)], name=text, mode="lines", stackgroup="shares",
                line={"width": 0, "color": tone}, fillcolor=tone, opacity=1, hoveron="points", legendgroup=text,
                customdata=[[step, percent(rows[step].get(cause, 0.0))] for step in kept for _ in (0, 1)],
                hovertemplate=f"step %{{customdata[0]:,d}}<br>%{{customdata[1]}}<extra>{text}</extra>",
            )
        )  # fmt: skip


def _sizes(figure: go.Figure, size: dict[str, Line]) -> None:
    before = len(figure.data)
    tones = {"log ratio": COLORS["liger"], "engine noise": COLORS["reference"], "noise floor": GREY}
    for text, line in size.items():
        if line.empty:
            continue
        dash = {"noise floor": "dash", "bfloat16 noise": "dot"}.get(text, "solid")
        shown = {"log ratio": "log ratio, rms", "engine noise": "unexplained, rms"}.get(text, text)
        width = 4.0 if text == "log ratio" else 2.0
        add_line(figure, line, name=shown, color=tones.get(text, AMBER), dash=dash, width=width, band=False)
    for trace in figure.data[before:]:
        trace.update(**axes_of(1))
    set_log(figure.layout[name("yaxis", 1)], [v for line in size.values() for v in line.mid], room=1.8)


def _clip_words(clipped: int, looks: int) -> str:
    if not clipped:
        return ""
    return (
        f" At {clipped:,} of {looks:,} steps a part works against the others and has a negative share: it is drawn as "
        "zero and the rest scaled to 100%."
    )


def _product_words(records: Sequence[StepRecord]) -> str:
    """What the sequence product makes of it, from the latest record that says so."""
    for record in reversed(records):
        for cause in record.is_ratio.causes if record.is_ratio is not None else ():
            if cause.id == "sequence_product" and cause.factor is not None:
                return (
                    " The correction multiplies the token ratios of a sequence, which makes of one token's ratio "
                    f"{number(cause.factor)} times it (step {record.step})."
                )
    return ""
