"""The weight-sync canary: how far the engine is from each set of weights, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from driftscope.dashboards.figures.base import COLORS, GREY, RED, Panel, dropped_note, new_figure, set_log, step_axis
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.series import Field, Getter, by_step, getter, middle, why_unavailable
from driftscope.dashboards.wording import number, weights_label
from driftscope.records import StepRecord

ID, TITLE = "canary", "Which weights the engine agrees with"
STYLES = {
    "current": (COLORS["liger"], 4.0, "solid"),
    "previous": (COLORS["reference"], 2.5, "solid"),
    "adapter_off": (COLORS["oracle"], 2.5, "dash"),
}


def distance_to(weights: str) -> Getter:
    """A getter for the engine's distance from one set of weights."""
    return Field(("canary", "distances", weights))


def canary(steps: Sequence[StepRecord]) -> Panel:
    """Root mean square of the engine's log-probs minus those of the trainer under each set of weights."""
    looks = [s for s in steps if s.canary is not None]
    names = [n for n in STYLES if any(s.canary is not None and n in s.canary.distances for s in looks)]
    lines = {n: by_step(looks, distance_to(n), log=True) for n in names}
    lines = {n: line for n, line in lines.items() if not line.empty}
    if not lines:
        why = why_unavailable(steps, "canary")
        return Panel.missing(ID, TITLE, why or "no record holds a look of the weight-sync canary.")
    figure = new_figure(y_title="nats a token (rms)")
    for weights, line in lines.items():
        color, width, dash = STYLES[weights]
        add_line(figure, line, name=weights_label(weights), color=color, width=width, dash=dash, band=False)
    floor = by_step(looks, getter("canary.noise_floor"), log=True)
    add_line(figure, floor, name="noise floor", color=GREY, width=2.0, dash="dot", band=False)
    for step in sorted({s.step for s in looks if s.canary is not None and s.canary.agrees_with != "current"})[:1]:
        figure.add_vline(x=step, line={"color": RED, "width": 1.2, "dash": "dash"})
        figure.add_annotation(
            x=step, xref="x", y=0.5, yref="paper", text=f" other weights from step {step}", showarrow=False,
            xanchor="left", yanchor="middle", font={"color": RED, "size": 12},
        )  # fmt: skip
    set_log(figure.layout.yaxis, [v for line in (*lines.values(), floor) for v in line.mid], room=1.8)
    step_axis(figure, (s.step for s in looks))
    words = ", ".join(f"{weights_label(n)} {number(middle(steps, distance_to(n)))}" for n in lines)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=400,
        caption="A few freshly sampled tokens, scored by the trainer under its current weights, under those of an "
        "earlier look and without its adapters. The engine runs on the weights whose line lies at the noise floor, "
        "once truncated sampling and temperature are taken off: they raise all the lines alike. Where only a part of "
        "its weights is old, no line does." + dropped_note(lines.values()),
        alt=f"Distance of the engine's log-probs from each set of weights, logarithmic. Medians: {words}.",
    )  # fmt: skip
