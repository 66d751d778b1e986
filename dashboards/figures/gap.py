"""The gap: candidate over reference, against its thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import (
    AMBER,
    GREY,
    RED,
    Panel,
    color_of,
    dropped_note,
    mark_level,
    name_of,
    new_figure,
    set_log,
    step_axis,
    translucent,
)
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.series import by_step, extremes, getter, middle, pair, thin, why_unavailable
from driftscope.dashboards.wording import factor, number, path_label
from driftscope.records import StepRecord

ID, TITLE = "gap", "The gap and its thresholds"


def gap(steps: Sequence[StepRecord], *, warning: float = 1.5, critical: float = 10.0) -> Panel:
    """``gap.grad_norm_ratio`` over the steps; on deep steps also ``param_grad_norm_ratio``.

    A gap counts in both directions, so each threshold is drawn at its value and at its reciprocal.
    """
    line = by_step(steps, getter("gap.grad_norm_ratio"), log=True)
    deep = by_step(steps, getter("gap.param_grad_norm_ratio"), log=True)
    if line.empty and deep.empty:
        why = why_unavailable(steps, "gap", "gap.grad_norm_ratio")
        return Panel.missing(
            ID, TITLE, why or "no record compares two paths (is there only one loss path in this run?)."
        )
    candidate, reference = pair(steps)
    figure = new_figure(y_title="candidate / reference")
    seen = [v for v in (*line.low, *line.high, *deep.mid) if v is not None]
    below, above = min([1.0, *seen]), max([1.0, *seen])
    low = below / 1.6 if below >= 1 / warning else min(below / 1.6, 1 / critical)
    low, high = min(low, 1 / (warning * 1.35)), max(above * 1.6, warning * 1.35)
    _zones(figure, low, high, warning, critical)
    floor = middle(steps, getter("gap.noise_floor"))
    if floor:
        figure.add_hrect(
            y0=1 / (1 + floor), y1=1 + floor, fillcolor=translucent(GREY, 0.35), line_width=0, layer="below"
        )
    add_line(figure, line, name="hidden gradient", color=color_of(candidate), unit="×")
    if not deep.empty:
        deep = thin(deep)
        figure.add_trace(
            go.Scatter(
                x=deep.x, y=deep.mid, mode="markers", name="all parameters (deep steps)",
                marker={"symbol": "diamond", "size": 10, "color": color_of("oracle")},
                hovertemplate="step %{x:,d}<br>%{y:.4~g}×<extra>all parameters</extra>",
            )
        )  # fmt: skip
    set_log(figure.layout.yaxis, [low, high], room=1.0, suffix="×")
    figure.layout.yaxis.update(title=f"{name_of(candidate)} / {name_of(reference)}")
    figure.update_layout(showlegend=True)
    step_axis(figure, (s.step for s in steps))
    noise = (
        f" The noise floor measured in this run is {number(floor)}: no gap below it means anything." if floor else ""
    )
    return Panel(
        id=ID, title=TITLE, figure=figure,
        caption=f"How many times larger {path_label(candidate)}'s gradient is than {path_label(reference)}'s. At "
        "1× the "
        f"two agree; amber begins at {warning:g}× (warning), red at {critical:g}× (critical), and likewise "
        f"below 1×." + noise + dropped_note([line, deep]),
        alt=f"Gap in gradient norm over the steps, logarithmic: {_words(steps)} Thresholds at {warning:g}× and "
        f"{critical:g}×.",
    )  # fmt: skip


def _zones(figure: go.Figure, low: float, high: float, warning: float, critical: float) -> None:
    """Shade the amber and red zones inside the axis range, and name their edges."""
    figure.add_hline(y=1, line={"color": GREY, "width": 1.5})
    zones = ((warning, critical, AMBER, f"warning {warning:g}×"), (critical, math.inf, RED, f"critical {critical:g}×"))
    for start, end, color, text in zones:
        for edge, other in ((start, end), (1 / start, 1 / end)):
            if not low < edge < high:
                continue
            outer = min(max(other, low), high)
            figure.add_hrect(y0=edge, y1=outer, fillcolor=translucent(color, 0.09), line_width=0, layer="below")
            shown = text if edge > 1 else f"{text.split()[0]} {edge:.2g}×"
            mark_level(figure, edge, shown, color, below=edge < 1)


def _words(steps: Sequence[StepRecord]) -> str:
    ends = extremes(steps, getter("gap.grad_norm_ratio"))
    if ends is None:
        return "no value for the hidden gradient."
    typical = middle(steps, getter("gap.grad_norm_ratio"))
    return f"median {factor(typical)}, from {factor(ends[0])} to {factor(ends[1])}."
