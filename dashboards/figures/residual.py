"""The residual: how much of the live gradient no token coefficient explains."""

from __future__ import annotations

from collections.abc import Sequence

from driftscope.dashboards.figures.base import (
    GREY,
    Panel,
    color_of,
    dropped_note,
    mark_level,
    name_of,
    new_figure,
    set_log,
    step_axis,
)
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.series import by_step, extremes, getter, middle, why_unavailable
from driftscope.dashboards.wording import number
from driftscope.records import StepRecord

RESIDUAL = getter("residual")
ID, TITLE = "residual", "Residual of the live path"


def residual(steps: Sequence[StepRecord]) -> Panel:
    """|g - c u| / |g| of the live hidden gradient, next to the noise floor of the run."""
    line = by_step(steps, RESIDUAL, log=True)
    if line.empty:
        exact = extremes(steps, RESIDUAL)
        zero = "it is exactly zero at every step, which a logarithmic axis cannot show." if exact else None
        why = why_unavailable(steps, "residual", "spectrum")
        return Panel.missing(ID, TITLE, zero or why or "no record measured the live hidden gradient.")
    live = steps[-1].live
    figure = new_figure(y_title="residual, relative")
    add_line(figure, line, name=name_of(live, live), color=color_of(live))
    floor = middle(steps, getter("gap.noise_floor"))
    if floor:
        mark_level(figure, floor, f"noise floor {number(floor)}", GREY)
    seen = [v for v in (*line.low, *line.high, floor or None) if v is not None]
    set_log(figure.layout.yaxis, seen, room=5.0)
    figure.update_layout(showlegend=False)
    step_axis(figure, (s.step for s in steps))
    return Panel(
        id=ID, title=TITLE, figure=figure, height=320,
        caption="The part of the live gradient that no weighting of the tokens can produce. Rounding alone leaves "
        "about 10⁻⁷ to 10⁻⁵ "
        "in fp32 and 10⁻³ to 10⁻² in bf16; much more points to a logit transform or an extra loss term that the "
        "live path "
        "treats differently." + dropped_note([line]),
        alt=f"Residual of the live path over the steps, logarithmic: median "
        f"{number(middle(steps, RESIDUAL))}.",
    )  # fmt: skip
