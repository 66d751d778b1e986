"""Figures of several rows that share one horizontal axis."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import new_figure

GAP = 0.07


def new_rows(titles: Sequence[str], shares: Sequence[float], *, x_title: str = "optimizer step") -> go.Figure:
    """A figure with a y axis for each title, from top to bottom; ``shares`` are the heights, in any unit.

    Draw into row ``i`` (from 0) with ``**axes_of(i)``.
    """
    figure = new_figure(y_title="", x_title=x_title)
    room = 1 - GAP * (len(titles) - 1)
    top = 1.0
    for i, (title, share) in enumerate(zip(titles, shares, strict=True)):
        height = room * share / sum(shares)
        last = i == len(titles) - 1
        bottom = 0.0 if last else top - height
        axis = {"domain": [bottom, top], "zeroline": False, "automargin": True, "title": {"text": title}}
        figure.layout[name("yaxis", i)] = axis | {"anchor": name("x", i)}
        figure.layout[name("xaxis", i)] = {
            "zeroline": False,
            "automargin": True,
            "anchor": name("y", i),
            "showticklabels": last,
            "title": {"text": x_title} if last else None,
            **({"matches": "x"} if i else {}),
        }
        top = bottom - GAP
    return figure


def name(axis: str, row: int) -> str:
    """Plotly's name of an axis of row ``row``: ``yaxis``, ``yaxis2``; ``y``, ``y2``."""
    return axis + (str(row + 1) if row else "")


def axes_of(row: int) -> dict[str, str]:
    """What a trace of that row is given."""
    return {"xaxis": name("x", row), "yaxis": name("y", row)}
