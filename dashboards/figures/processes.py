"""What several processes had to say, and the gradient over all parameters: who is slowest, how far two paths part."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import (
    COLORS,
    GREY,
    RED,
    Panel,
    color_of,
    label,
    new_figure,
    set_log,
    step_axis,
    translucent,
)
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.series import by_step, getter, middle
from driftscope.dashboards.wording import clean, count, factor, number, path_label
from driftscope.records import Estimate, StepRecord

BARS = 15


def slowest(steps: Sequence[StepRecord]) -> Panel | None:
    """Own time of the slowest rank beside the median of the ranks; a mark where ranks disagree."""
    known = [s for s in steps if s.ranks is not None]
    lines = {
        "slowest rank": (by_step(known, getter("ranks.slowest_ms")), COLORS["liger"]),
        "median of the ranks": (by_step(known, getter("ranks.median_ms")), GREY),
    }
    if all(line.empty for line, _ in lines.values()):
        return None
    figure = new_figure(y_title="own time in the step, ms")
    figure.layout.yaxis.update(rangemode="tozero")
    for name, (line, color) in lines.items():
        add_line(figure, line, name=name, color=color, band=False)
    apart = sorted({s.step for s in known if s.ranks is not None and s.ranks.disagree})
    if apart:
        figure.add_trace(
            go.Scatter(
                x=apart, y=[0] * len(apart), mode="markers", name="ranks disagree",
                marker={"symbol": "x", "size": 9, "color": RED},
                hovertemplate="step %{x:,d}: ranks disagree<extra></extra>",
            )
        )  # fmt: skip
    step_axis(figure, (s.step for s in known))
    longest, typical = middle(steps, getter("ranks.slowest_ms")), middle(steps, getter("ranks.median_ms"))
    return Panel(
        id="ranks-time", title="The slowest rank", figure=figure, height=320,
        caption="The time that a rank needs by itself, waiting for the others left out. All ranks wait for the "
        "slowest one, so the distance between the lines is time lost.",
        alt=f"Own time of the slowest rank, median {number(longest)} ms, beside the median of the ranks, "
        f"{number(typical)} ms.",
    )  # fmt: skip


def gradient(steps: Sequence[StepRecord]) -> list[Panel]:
    """Norm ratio over the steps with its standard error, and the modules that the difference sits in."""
    known = [s for s in steps if s.gradient is not None]
    return [panel for panel in (_ratio(steps, known), _modules(known)) if panel is not None]


def _ratio(steps: Sequence[StepRecord], known: Sequence[StepRecord]) -> Panel | None:
    found = [(s.step, s.gradient.norm_ratio) for s in known if s.gradient is not None and s.gradient.norm_ratio]
    points = [(step, e.value, e.error or 0.0) for step, e in found if e.value is not None and e.value > 0]
    if not points:
        return None
    figure = new_figure(y_title="candidate / reference")
    figure.add_hline(y=1, line={"color": GREY, "width": 1.5})
    figure.add_trace(
        go.Scatter(
            x=[p[0] for p in points], y=[p[1] for p in points], mode="markers", name="all parameters",
            marker={"symbol": "diamond", "size": 8, "color": color_of("oracle")},
            error_y={"array": [2 * p[2] for p in points], "color": translucent(color_of("oracle"), 0.7)},
            hovertemplate="step %{x:,d}: %{y:.4~g}×<extra>all parameters</extra>",
        )
    )  # fmt: skip
    set_log(figure.layout.yaxis, [1.0, *(v for p in points for v in (p[1] - 2 * p[2], p[1] + 2 * p[2]))], suffix="×")
    step_axis(figure, (p[0] for p in points))
    figure.update_layout(showlegend=False)
    typical = middle(steps, getter("gradient.norm_ratio.value"))
    return Panel(
        id="gradient-ratio", title="Gradient norm over all parameters, candidate over reference", figure=figure,
        height=320,
        caption="Measured on deep steps over the whole accumulation window and all ranks. Bars span two standard "
        "errors to either side; an exact figure has none.",
        alt=f"Ratio of the full gradient norms over the deep steps: median {factor(typical)}.",
    )  # fmt: skip


def _modules(known: Sequence[StepRecord]) -> Panel | None:
    record = next((s for s in reversed(known) if s.gradient is not None and s.gradient.modules), None)
    if record is None or record.gradient is None:
        return None
    rows = [m for m in record.gradient.modules if m.share is not None][:BARS]
    if not rows:
        return None
    figure = new_figure(y_title="", x_title="share of the squared difference")
    names = [label(clean(m.name)) for m in rows]
    sizes = [[number(m.candidate), number(m.reference), number(m.cosine)] for m in rows]
    figure.add_trace(
        go.Bar(
            y=names, x=[m.share for m in rows], orientation="h", marker={"color": COLORS["liger"]}, customdata=sizes,
            hovertemplate="%{y}: %{x:.1%}<br>candidate %{customdata[0]}, reference %{customdata[1]}, cosine "
            "%{customdata[2]}<extra></extra>",
        )
    )  # fmt: skip
    figure.layout.yaxis.update(title=None, autorange="reversed", type="category")
    figure.layout.xaxis.update(tickformat=".0%", rangemode="tozero")
    sides = " and ".join(path_label(p) for p in (record.gradient.candidate, record.gradient.reference) if p)
    return Panel(
        id="gradient-modules", title="Where the two gradients part", figure=figure, height=110 + 26 * len(rows),
        caption=f"The modules with the largest part of the difference between the gradients of "
        f"{sides or 'both paths'} at step {record.step:,}: {count(len(rows), 'module')} of those on record.",
        alt="Modules by their share of the difference: "
        + ", ".join(f"{clean(m.name)} {m.share:.1%}" for m in rows[:5] if m.share is not None) + ".",
    )  # fmt: skip


def estimate(found: Estimate | None) -> str:
    """A figure with its standard error: ``1.02 ± 0.01``, or a dash."""
    if found is None or found.value is None:
        return number(None)
    return number(found.value, 4) + (f" ± {number(found.error, 2)}" if found.error else "")
