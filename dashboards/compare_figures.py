"""Runs over their steps: one figure each for the gap, the gradient norm and the importance sampling ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from driftscope.comparison.figures import DRAWN, FIGURES
from driftscope.comparison.loading import thin
from driftscope.comparison.model import Comparison, RunColumn, Series
from driftscope.dashboards.compare_view import labels, value_text
from driftscope.dashboards.figures.base import GREY, Panel, label, new_figure, set_log, step_axis

# Six hues that stay apart in the common forms of colour blindness and carry on white and on near-black; dash and
# marker symbol tell apart what shares a hue.
HUES = ("#2a78c8", "#d55e00", "#00916a", "#b45c9a", "#a87900", "#7b828c")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down")
POINTS = 12_000  # of all runs in one figure
MARKERS = 7

TITLES = {
    "gap": "Gap in gradient norm",
    "live_grad_norm": "Gradient norm reported by the trainer",
    "is_ratio": "Importance sampling ratio, mean as applied",
}
CAPTIONS = {
    "gap": "How many times larger the candidate's gradient is than the reference's, on the same batches. At 1× the "
    "two paths agree.",
    "live_grad_norm": "Over all trainable parameters, before clipping: what the optimiser gets.",
    "is_ratio": "The policy's probability of the sampled text over the sampler's, as the loss applies it. At 1 "
    "trainer and sampler agree.",
}


@dataclass(frozen=True)
class Style:
    """How a run is drawn, the same in every figure and in the key."""

    color: str
    dash: str
    symbol: str
    width: float

    @property
    def dasharray(self) -> str:
        """The dash as SVG has it."""
        return {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}[self.dash]


def style(index: int, baseline: int) -> Style:
    """The style of run ``index``: 84 of them differ. The baseline is drawn broad, below the others."""
    return Style(
        HUES[index % len(HUES)],
        DASHES[index // len(HUES) % len(DASHES)],
        SYMBOLS[index % len(SYMBOLS)],
        5.0 if index == baseline else 2.0,
    )


def panels(c: Comparison) -> list[Panel]:
    """The three figures, each of all runs."""
    return [_panel(c, name) for name in DRAWN]


def _panel(c: Comparison, name: str) -> Panel:
    where = name.replace("_", "-")
    drawn = [(i, run, run.lines[name]) for i, run in enumerate(c.runs) if run.lines.get(name)]
    if not drawn:
        return Panel.missing(where, TITLES[name], "no run has a value above zero.")
    figure = new_figure(y_title=TITLES[name])
    limit = max(60, POINTS // len(drawn))
    names = labels(c)
    for i, _, line in sorted(drawn, key=lambda entry: entry[0] != c.baseline):
        figure.add_trace(_trace(thin(line, limit), names[i], style(i, c.baseline), i, "×" if name == "gap" else ""))
    if name != "live_grad_norm":
        figure.add_hline(y=1, line={"color": GREY, "width": 1.2})
    reach = [v for _, _, line in drawn for v in line.values] + ([1.0] if name != "live_grad_norm" else [])
    set_log(figure.layout.yaxis, reach, suffix="×" if name == "gap" else "")
    step_axis(figure, (step for _, _, line in drawn for step in (line.steps[0], line.steps[-1])))
    figure.update_layout(showlegend=False)
    return Panel(
        id=where, title=TITLES[name], figure=figure, caption=CAPTIONS[name] + _left_out(c, name),
        alt=f"{TITLES[name]} over the steps, logarithmic. Medians: {_medians(c, name)}.", height=420,
    )  # fmt: skip


def _trace(line: Series, name: str, look: Style, index: int, unit: str) -> go.Scatter:
    shown = label(name)
    return go.Scatter(
        x=line.steps, y=line.values, name=shown, mode="lines+markers", meta=index,
        line={"color": look.color, "width": look.width, "dash": look.dash},
        marker={"size": 8, "symbol": look.symbol, "color": look.color, "maxdisplayed": MARKERS},
        opacity=0.6 if look.width > 4 else 1,
        hovertemplate=f"step %{{x:,d}}<br>%{{y:.4~g}}{unit}<extra>{shown}</extra>",
    )  # fmt: skip


def _left_out(c: Comparison, name: str) -> str:
    """What a logarithmic axis cannot show, and which runs have no value."""
    zeros = sum(run.dropped.get(name, 0) for run in c.runs)
    words = ""
    if zeros:
        words += f" Steps with a value of zero, which a logarithmic axis cannot show: {zeros:,}."
    missing = [run for run in c.runs if not run.lines.get(name)]
    if missing:
        words += f" Without a value: {_names(missing)}."
    return words


def _names(runs: Sequence[RunColumn], limit: int = 8) -> str:
    shown = ", ".join(run.label for run in runs[:limit])
    return shown + (f" and {len(runs) - limit} more" if len(runs) > limit else "")


def _medians(c: Comparison, name: str) -> str:
    row = next((row for row in c.figures if row.figure.id == name), None)
    figure = next(f for f in FIGURES if f.id == name)
    if row is None:
        return "unavailable"
    shown = [f"{run.label} {value_text(figure, cell.value)}" for run, cell in zip(c.runs, row.cells, strict=True)]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
