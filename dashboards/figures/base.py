"""What every figure shares: the panel it returns, its palette, its axes. Figures are pure functions of the records.

Text colours are set in the browser from the page's theme; the palette's tones carry on white and on near-black.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from driftscope.dashboards.series import Line
from driftscope.dashboards.wording import SUPERSCRIPT, clean, path_label

COLORS = {"liger": "#d9622b", "reference": "#2f78d0", "corrected": "#25976a", "oracle": "#8d68c8"}
EXTRA_COLORS = ("#b5539c", "#8a7a2c", "#3a98a5", "#a45b4b")
GREY = "#7b828c"
AMBER = "#a97000"
RED = "#d64545"


@dataclass(frozen=True)
class Panel:
    """One figure of the report.

    ``figure`` is None where the data are missing; ``unavailable`` then says why. ``alt`` is the figure in words.
    """

    id: str
    title: str
    caption: str
    alt: str = ""
    figure: go.Figure | None = None
    unavailable: str | None = None
    height: int = 380

    @classmethod
    def missing(cls, panel_id: str, title: str, why: str) -> Panel:
        """A panel that says why it has nothing to show."""
        return cls(id=panel_id, title=title, caption="", unavailable=f"Unavailable: {why}")


def label(text: str, limit: int = 60) -> str:
    """Run data as a plotly label: shown as text, never read as plotly's markup, cut at ``limit`` characters."""
    text = " ".join(clean(text).split())
    return html.escape(text if len(text) <= limit else text[: limit - 1] + "…", quote=False)


def name_of(path: str, live: str | None = None) -> str:
    """A path's legend entry."""
    return label(path_label(path)) + (" · trains" if path == live else "")


def color_of(path: str) -> str:
    """A path's colour, the same in every figure."""
    if path in COLORS:
        return COLORS[path]
    return EXTRA_COLORS[sum(map(ord, path)) % len(EXTRA_COLORS)]


def translucent(color: str, alpha: float) -> str:
    """``#rrggbb`` as an rgba() colour."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{alpha})"


def new_figure(*, y_title: str, x_title: str = "optimizer step") -> go.Figure:
    """An empty figure with the report's axes: transparent, legend above, one hover box per trace."""
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 64, "r": 20, "t": 12, "b": 48},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        hovermode="closest",
        xaxis={"title": {"text": x_title}, "zeroline": False, "automargin": True},
        yaxis={"title": {"text": y_title}, "zeroline": False, "automargin": True},
    )
    return figure


def set_log(axis: Any, found: Iterable[float | None], *, room: float = 1.35, suffix: str = "") -> None:
    """A logarithmic axis around the positive values of ``found``, a factor ``room`` wider on both sides.

    Ticks stand at powers of ten; at 1, 2 and 5 of each where the axis spans little. It stays as it is where no value
    is positive.
    """
    known = [v for v in found if v is not None and v > 0 and math.isfinite(v)]
    if not known:
        return
    low, high = math.log10(min(known)) - math.log10(room), math.log10(max(known)) + math.log10(room)
    ticks = log_ticks(low, high)
    axis.update(
        type="log", range=[low, high], tickmode="array", tickvals=ticks,
        ticktext=[_tick_text(t) + suffix for t in ticks], minor={"ticks": ""},
    )  # fmt: skip


def log_ticks(low: float, high: float) -> list[float]:
    """Three to eight tick values for an axis from 10**low to 10**high."""
    decades = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    if len(decades) >= 3:
        stride = math.ceil(len(decades) / 7)
        return [10.0**d for d in decades if d % stride == 0]
    steps: tuple[float, ...] = (1, 2, 5)
    if high - low < 0.8:
        steps = (1, 1.5, 2, 3, 4, 5, 7)
    if high - low < 0.15:
        return _even_ticks(10**low, 10**high)
    grid = (float(f"{m}e{d}") for d in range(math.floor(low), math.ceil(high) + 1) for m in steps)
    return [v for v in grid if 10**low <= v <= 10**high]


def _even_ticks(start: float, end: float) -> list[float]:
    """Round values at even distances: what a logarithmic axis over a few percent can be read by."""
    unit = 10.0 ** math.floor(math.log10((end - start) / 3))
    step = next(m * unit for m in (1, 2, 5, 10) if (end - start) / (m * unit) <= 5)
    return [float(f"{i * step:.10g}") for i in range(math.ceil(start / step), math.floor(end / step) + 1)]


def _tick_text(value: float) -> str:
    if 0.9e-3 <= value < 1e6:
        return f"{value:,.10g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPT)
    return power if float(mantissa) == 1 else f"{float(mantissa):g}×{power}"


def mark_level(figure: go.Figure, value: float, text: str, color: str, *, below: bool = False) -> None:
    """A dashed horizontal line at ``value`` of a logarithmic y axis, with its name at the right end."""
    figure.add_hline(y=value, line={"color": color, "width": 1.2, "dash": "dash"})
    figure.add_annotation(
        x=1, xref="paper", y=math.log10(value), yref="y", text=text, showarrow=False, xanchor="right",
        yanchor="top" if below else "bottom", font={"color": color, "size": 12},
    )  # fmt: skip


def step_axis(figure: go.Figure, xs: Iterable[float]) -> None:
    """Whole-number ticks, and a little room on both sides (a one-step run has no width of its own)."""
    known = list(xs)
    if not known:
        return
    first, last = min(known), max(known)
    pad = max(0.5, 0.02 * (last - first))
    figure.layout.xaxis.update(range=[first - pad, last + pad], tickformat=",d")
    if last - first < 8:
        figure.layout.xaxis.update(dtick=1)


def dropped_note(lines: Iterable[Line]) -> str:
    """A sentence on values that the logarithmic axis cannot show, or nothing."""
    n = sum(line.dropped for line in lines)
    if not n:
        return ""
    values_are = "1 value is" if n == 1 else f"{n:,} values are"
    return f" {values_are} zero or negative, which a logarithmic axis cannot show."
