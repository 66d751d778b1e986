"""The importance sampling ratio as a distribution, rebuilt from the quantiles that each record keeps."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import COLORS, GREY, Panel, new_figure, set_log, translucent
from driftscope.dashboards.figures.ratio_time import ratio_value
from driftscope.dashboards.series import extremes, middle, why_unavailable
from driftscope.dashboards.wording import number, percent
from driftscope.records import StepRecord

ID, TITLE = "is-distribution", "Importance sampling ratio as a distribution"
BOX = ("p05", "p25", "p50", "p75", "p95")
ROWS = (
    ("raw_token", "raw, per token", "corrected"),
    ("raw", "raw", "reference"),
    ("applied", "applied by the loss", "liger"),
)


def ratio_distribution(steps: Sequence[StepRecord]) -> Panel:
    """A box per ratio: each of its five edges is the median, over micro-batches, of that quantile.

    It is the typical micro-batch, not the pooled tokens: records keep quantiles, not every token.
    """
    figure = new_figure(x_title="ratio, policy / sampler", y_title="")
    shown: list[float] = []
    words: list[str] = []
    at_zero: list[str] = []
    for which, name, path in ROWS:
        edges = _edges(steps, which)
        if edges is None:
            continue
        if edges[-1] <= 0:
            at_zero.append(name)
            continue
        positive = min(v for v in edges if v > 0)
        if edges[0] <= 0:
            at_zero.append(name)
        edges = [max(v, positive) for v in edges]
        ends = [v for v in _extremes(steps, which) if v > 0]
        shown += edges + ends
        words.append(f"{name}: median {number(edges[2])}, middle 90% from {number(edges[0])} to {number(edges[4])}")
        _add_box(figure, name, COLORS[path], edges, ends)
    if not words:
        why = why_unavailable(steps, "is_ratio", "sampling_logps")
        zeros = f"every recorded quantile of the ratio is zero ({', '.join(at_zero)})." if at_zero else None
        return Panel.missing(ID, TITLE, why or zeros or "no record holds the ratio's quantiles.")
    figure.add_vline(x=1, line={"color": GREY, "width": 1.2})
    set_log(figure.layout.xaxis, [*shown, 1.0], room=1.6)
    figure.layout.yaxis.update(title=None, autorange="reversed", tickfont={"size": 13})
    figure.update_layout(showlegend=False)
    zero = f" Part of it is exactly zero ({', '.join(at_zero)}), which this axis cannot show." if at_zero else ""
    return Panel(
        id=ID,
        title=TITLE,
        figure=figure,
        height=130 + 75 * len(words),
        caption="The box holds the middle half of the tokens or sequences of a typical micro-batch, the whiskers "
        "its middle 90%, the "
        "dots the lowest and highest of the whole run. Rebuilt from the quantiles in the records: each edge is the "
        "median "
        "over micro-batches." + zero + _shares(steps),
        alt="Distribution of the importance sampling ratio, logarithmic. " + "; ".join(words) + ".",
    )


def _edges(steps: Sequence[StepRecord], which: str) -> list[float] | None:
    found = [middle(steps, ratio_value(which, q)) for q in BOX]
    known = [v for v in found if v is not None]
    return known if len(known) == len(BOX) else None


def _extremes(steps: Sequence[StepRecord], which: str) -> list[float]:
    low, high = extremes(steps, ratio_value(which, "min")), extremes(steps, ratio_value(which, "max"))
    return ([low[0]] if low else []) + ([high[1]] if high else [])


def _add_box(figure: go.Figure, name: str, color: str, edges: list[float], ends: list[float]) -> None:
    figure.add_trace(
        go.Box(
            y=[name],
            lowerfence=[edges[0]],
            q1=[edges[1]],
            median=[edges[2]],
            q3=[edges[3]],
            upperfence=[edges[4]],
            orientation="h",
            name=name,
            line={"color": color},
            fillcolor=translucent(color, 0.2),
            boxpoints=False,
            width=0.5,
        )
    )
    if ends:
        figure.add_trace(
            go.Scatter(
                x=ends,
                y=[name] * len(ends),
                mode="markers",
                name=name,
                marker={"color": color, "size": 7},
                hovertemplate="%{x:.4~g}<extra>lowest or highest of the run</extra>",
            )
        )


def _shares(steps: Sequence[StepRecord]) -> str:
    parts = []
    for field, text in (("share_masked", "set to zero by the mask"), ("share_capped", "at or over the cap")):
        share = middle(steps, ratio_value("applied", field))
        if share:
            parts.append(f"{percent(share)} {text}")
    return f" Of the applied ratios, {' and '.join(parts)} (median micro-batch)." if parts else ""
