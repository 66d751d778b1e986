"""Gradient norm of every path over the steps."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from driftscope.dashboards.figures.base import (
    GREY,
    Panel,
    color_of,
    dropped_note,
    name_of,
    new_figure,
    set_log,
    step_axis,
)
from driftscope.dashboards.figures.lines import add_line, add_path
from driftscope.dashboards.series import Line, by_step, getter, middle, path_value, paths_in, thin, why_unavailable
from driftscope.dashboards.wording import number, path_label
from driftscope.records import StepRecord

ID, TITLE = "grad-norm", "Gradient norm of every path"


def grad_norm(steps: Sequence[StepRecord]) -> Panel:
    """Hidden gradient norm sqrt(sum |dL/dh|^2) per path; below it the norm over all trainable parameters.

    The lower axes hold ``live_grad_norm`` (what the trainer clips on) and, on deep steps, each path's own.
    """
    paths = paths_in(steps)
    live = steps[-1].live if steps else None
    hidden = {p: by_step(steps, path_value(p, "hidden_grad_norm"), log=True) for p in paths}
    full = {p: by_step(steps, path_value(p, "param_grad_norm"), log=True) for p in paths}
    reported = by_step(steps, getter("live_grad_norm"), log=True)
    hidden = {p: line for p, line in hidden.items() if not line.empty}
    full = {p: line for p, line in full.items() if not line.empty}
    if not hidden and not full and reported.empty:
        why = why_unavailable(steps, "hidden_grad_norm", "paths") or "no record holds a gradient norm."
        return Panel.missing(ID, TITLE, why)
    parameters = bool(full) or not reported.empty
    figure = _axes(both=bool(hidden) and parameters, hidden=bool(hidden))
    for path, line in sorted(hidden.items(), key=lambda item: item[0] != "reference"):
        add_path(figure, line, path, live)
    row = 2 if hidden and parameters else 1
    _add_parameters(figure, full, reported, live, row=row)
    set_log(figure.layout.yaxis, _values(*hidden.values()) if hidden else _values(*full.values(), reported))
    if row == 2:
        set_log(figure.layout.yaxis2, _values(*full.values(), reported))
    step_axis(figure, (s.step for s in steps))
    if row == 2:
        lower = {
            k: v
            for k, v in figure.layout.xaxis.to_plotly_json().items()
            if k in ("range", "tickformat", "dtick", "title")
        }
        figure.layout.xaxis2.update(lower)
        figure.layout.xaxis.update(title=None, showticklabels=False)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=560 if row == 2 else 380,
        caption=_caption(bool(hidden), parameters, bool(full)) + dropped_note([*hidden.values(), *full.values()]),
        alt=_alt(steps, list(hidden)),
    )  # fmt: skip


def _axes(*, both: bool, hidden: bool) -> go.Figure:
    first = "hidden gradient norm" if hidden else "parameter gradient norm"
    figure = new_figure(y_title=first)
    if not both:
        return figure
    split = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    layout = figure.layout.to_plotly_json()
    split.update_layout(
        template=go.layout.Template(), **{k: v for k, v in layout.items() if k not in ("xaxis", "yaxis", "template")}
    )
    split.update_xaxes(zeroline=False, automargin=True)
    split.update_yaxes(zeroline=False, automargin=True)
    split.layout.xaxis2.update(title={"text": "optimizer step"})
    split.layout.xaxis.update(title={"text": "optimizer step"})
    split.layout.yaxis.update(title={"text": first})
    split.layout.yaxis2.update(title={"text": "parameter gradient norm"})
    return split


def _add_parameters(figure: go.Figure, full: dict[str, Line], reported: Line, live: str | None, *, row: int) -> None:
    axes = {} if row == 1 else {"xaxis": "x2", "yaxis": "y2"}
    before = len(figure.data)
    add_line(figure, reported, name="reported by the trainer", color=GREY, width=2.5, band=False)
    for path, line in full.items():
        line, name = thin(line), name_of(path, live)
        figure.add_trace(
            go.Scatter(
                x=line.x, y=line.mid, mode="markers", name=name + ", all parameters", legendgroup=name,
                showlegend=not any(t.legendgroup == name for t in figure.data),
                marker={"symbol": "diamond", "size": 10, "color": color_of(path), "opacity": 0.85},
                hovertemplate=f"step %{{x:,d}}<br>%{{y:.4~g}}<extra>{name}, all parameters</extra>",
            )
        )  # fmt: skip
    for trace in figure.data[before:]:
        trace.update(**axes)


def _values(*lines: Line) -> list[float | None]:
    return [v for line in lines for v in (*line.low, *line.high)]


def _caption(hidden: bool, parameters: bool, full: bool) -> str:
    parts = []
    if hidden:
        parts.append(
            "How strongly each loss path would push the model on the same batch: lines that lie on each other "
            "agree. The axis "
            "is logarithmic, so equal distances are equal factors. Bands span the micro-batches of a step."
        )
    if parameters:
        where = "Below, the" if hidden else "The"
        parts.append(
            f"{where} norm over all trainable parameters: the grey line is what the trainer reports and clips on."
        )
    if full:
        parts.append("Diamonds are each path's own, computed on deep steps.")
    return " ".join(parts)


def _alt(steps: Sequence[StepRecord], paths: list[str]) -> str:
    parts = [f"{path_label(p)} {number(middle(steps, path_value(p, 'hidden_grad_norm')))}" for p in paths]
    reported = middle(steps, getter("live_grad_norm"))
    if reported is not None:
        parts.append(f"reported by the trainer {number(reported)} (over all parameters)")
    return "Gradient norm over the steps, logarithmic. Medians: " + ", ".join(parts) + "."
