"""Lines and their bands."""

from __future__ import annotations

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import color_of, name_of, translucent
from driftscope.dashboards.series import Line, thin

# Paths often lie on top of each other: a broad line below, a thin or dotted one above, so that each is seen.
WIDTHS = {"liger": 2.5, "reference": 5.0, "corrected": 2.5, "oracle": 1.8}
DASHES = {"corrected": "dash", "oracle": "dot"}


def add_line(
    figure: go.Figure,
    line: Line,
    *,
    name: str,
    color: str,
    width: float = 2.5,
    dash: str = "solid",
    band: bool = True,
    unit: str = "",
) -> None:
    """Draw ``line`` (thinned) and, where its micro-batches differ, the band between lowest and highest."""
    line = thin(line)
    if line.empty:
        return
    if band:
        add_band(figure, line, name=name, color=color)
    lonely = sum(v is not None for v in line.mid) <= 3 or _isolated(line.mid)
    figure.add_trace(
        go.Scatter(
            x=line.x, y=line.mid, name=name, legendgroup=name, mode="lines+markers" if lonely else "lines",
            line={"color": color, "width": width, "dash": dash}, marker={"size": 7, "color": color},
            opacity=0.55 if width >= 5 else 1, connectgaps=False,
            hovertemplate=f"step %{{x:,d}}<br>%{{y:.4~g}}{unit}<extra>{name}</extra>",
        )
    )  # fmt: skip


def add_band(figure: go.Figure, line: Line, *, name: str, color: str, alpha: float = 0.13) -> None:
    """Fill between lowest and highest, where the micro-batches of some step differ."""
    if not line.has_band:
        return
    for xs, low, high in _runs(thin(line)):
        figure.add_trace(
            go.Scatter(
                x=xs + xs[::-1], y=high + low[::-1], fill="toself", fillcolor=translucent(color, alpha), mode="lines",
                line={"width": 0}, hoverinfo="skip", showlegend=False, legendgroup=name,
            )
        )  # fmt: skip


def add_path(figure: go.Figure, line: Line, path: str, live: str | None) -> None:
    """Draw a loss path in its own colour, width and dash."""
    add_line(
        figure, line, name=name_of(path, live), color=color_of(path),
        width=WIDTHS.get(path, 2.0), dash=DASHES.get(path, "solid"),
    )  # fmt: skip


def _runs(line: Line) -> list[tuple[list[float], list[float], list[float]]]:
    """The stretches of a line without holes, as (x, low, high)."""
    runs: list[tuple[list[float], list[float], list[float]]] = [([], [], [])]
    for x, lo, hi in zip(line.x, line.low, line.high, strict=True):
        if lo is None or hi is None:
            runs.append(([], [], []))
        else:
            for column, v in zip(runs[-1], (x, lo, hi), strict=True):
                column.append(v)
    return [r for r in runs if len(r[0]) > 1]


def _isolated(mid: list[float | None]) -> bool:
    """True where a value stands between two holes: without a marker it would not be seen."""
    padded = [None, *mid, None]
    return any(
        b is not None and a is None and c is None for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)
    )
