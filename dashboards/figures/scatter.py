"""Token coefficients, candidate against reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import COLORS, GREY, Panel, label, name_of, new_figure, set_log
from driftscope.dashboards.series import finite, pair, why_unavailable
from driftscope.dashboards.wording import count, factor, path_label
from driftscope.records import CoefPoint, StepRecord

ID, TITLE = "coefficients", "Token coefficients, one dot per token"
Point = tuple[float, float, float | None]  # candidate, reference, applied IS ratio


def scatter(steps: Sequence[StepRecord]) -> Panel:
    """C = dL/dlogp per sampled token of the latest record with a scatter, magnitudes on logarithmic axes.

    Dots on the diagonal mean that the paths weigh the token alike; a parallel shift is one common factor, a cloud is a
    token-wise difference. Tokens that one path sets to zero have no place on a logarithmic axis: they are counted.
    """
    record = next((s for s in reversed(steps) if s.scatter), None)
    if record is None:
        why = why_unavailable(steps, "scatter", "spectrum", "coefficients")
        return Panel.missing(ID, TITLE, why or "no record holds sampled token coefficients.")
    points, zeros, lost = _sort(record.scatter)
    if not points:
        return Panel.missing(
            ID, TITLE, f"of {count(len(record.scatter), 'sampled token')} none is non-zero on both paths."
        )
    candidate, reference = (record.gap.candidate, record.gap.reference) if record.gap else pair(steps)
    names = name_of(candidate), name_of(reference)
    figure = new_figure(x_title=f"|c| {names[1]}", y_title=f"|c| {names[0]}")
    magnitudes = [abs(v) for p in points for v in p[:2]]
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        set_log(axis, magnitudes, room=1.6)
    ends = [min(magnitudes) / 1.6, max(magnitudes) * 1.6]
    figure.add_trace(
        go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": GREY, "dash": "dash"}, hoverinfo="skip")
    )
    _add_points(figure, points)
    ratio = median(abs(p[0] / p[1]) for p in points)
    gone = "".join(f" {count(n, 'token')} {text}." for n, text in zip((*zeros, lost), _GONE, strict=True) if n)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=540,
        caption=f"A coefficient is how hard the loss pushes one sampled token. On the dashed diagonal both paths "
        "push alike; "
        f"here the typical token is pushed {factor(ratio)} as hard by {path_label(candidate)}. A parallel shift is "
        "one "
        f"common factor, a scattered cloud differs token by token. Step {record.step}, micro-batch "
        f"{record.micro_step + 1}."
        + gone,
        alt=f"Scatter of {count(len(points), 'token coefficient')}: median of {path_label(candidate)} over "
        f"{path_label(reference)} {factor(ratio)}.",
    )  # fmt: skip


_GONE = (
    "not shown: zero on the candidate only",
    "not shown: zero on the reference only (the candidate trains on what the reference leaves out)",
    "not shown: zero on both paths",
    "not shown: no finite coefficient",
)


def _sort(sampled: Sequence[CoefPoint]) -> tuple[list[Point], tuple[int, int, int], int]:
    """(points that a log axis can show, counts of zeros (candidate, reference, both), count without a value)."""
    points: list[Point] = []
    only_candidate = only_reference = both = lost = 0
    for p in sampled:
        c, r = finite(p.candidate), finite(p.reference)
        if c is None or r is None:
            lost += 1
        elif c == 0 and r == 0:
            both += 1
        elif c == 0:
            only_candidate += 1
        elif r == 0:
            only_reference += 1
        else:
            points.append((c, r, finite(p.ratio)))
    return points, (only_candidate, only_reference, both), lost


def _add_points(figure: go.Figure, points: list[Point]) -> None:
    """One trace per sign; dots are coloured by the IS ratio where it varies, grey where a token has none."""
    ratios = [math.log10(p[2]) for p in points if p[2] is not None and p[2] > 0]
    low, high = (min(ratios), max(ratios)) if ratios else (0.0, 0.0)
    varies = high - low > 0.02
    groups = {
        "pushed up (c < 0)": ("circle", [p for p in points if p[0] < 0 and p[1] < 0]),
        "pushed down (c > 0)": ("diamond", [p for p in points if p[0] > 0 and p[1] > 0]),
        "opposite signs": ("x", [p for p in points if p[0] * p[1] < 0]),
    }
    for name, (symbol, group) in groups.items():
        shaded = [p for p in group if varies and p[2] is not None and p[2] > 0]
        plain = [p for p in group if p not in shaded]
        if shaded:
            shades = [math.log10(p[2]) for p in shaded if p[2] is not None]
            first = not any(t.marker.showscale for t in figure.data)
            scale = {"showscale": True, "colorbar": _colorbar(low, high)} if first else {}
            marker = {"color": shades, "colorscale": "Viridis", "cmin": low, "cmax": high} | scale
            _add_group(figure, shaded, name, symbol, marker)
        if plain:
            without = name + ", no ratio" if varies else name
            _add_group(figure, plain, without, symbol, {"color": GREY if varies else COLORS["reference"]})


def _add_group(figure: go.Figure, group: list[Point], name: str, symbol: str, marker: dict[str, Any]) -> None:
    figure.add_trace(
        go.Scatter(
            x=[abs(p[1]) for p in group], y=[abs(p[0]) for p in group], mode="markers", name=label(name),
            marker={"symbol": symbol, "size": 8, "opacity": 0.8, "line": {"width": 0.5, "color": GREY}} | marker,
            customdata=[[p[0], p[1], "unavailable" if p[2] is None else f"{p[2]:.4g}"] for p in group],
            hovertemplate="candidate %{customdata[0]:.4~g}<br>reference %{customdata[1]:.4~g}<br>"
            f"IS ratio %{{customdata[2]}}<extra>{label(name)}</extra>",
        )
    )  # fmt: skip


def _colorbar(low: float, high: float) -> dict[str, object]:
    ticks = [low + (high - low) * i / 4 for i in range(5)]
    return {
        "title": {"text": "IS ratio", "side": "top"}, "tickvals": ticks, "ticktext": [f"{10**t:.2g}" for t in ticks],
        "thickness": 10, "len": 0.9, "outlinewidth": 0,
    }  # fmt: skip
