"""What Driftscope spent, against its budget."""

from __future__ import annotations

from collections.abc import Sequence

from driftscope.dashboards.figures.base import AMBER, COLORS, Panel, new_figure, step_axis
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.series import by_step, getter
from driftscope.dashboards.wording import UNAVAILABLE, percent
from driftscope.records import StepRecord

ID, TITLE = "cadence", "Share of the step time that Driftscope spent"


def cadence(steps: Sequence[StepRecord]) -> Panel | None:
    """``cadence.spent`` over the steps, and the budget; ``None`` where no record has it."""
    line = by_step([s for s in steps if s.cadence is not None], getter("cadence.spent"))
    if line.empty:
        return None
    figure = new_figure(y_title="share of the step time so far")
    figure.layout.yaxis.update(tickformat=".2~%", rangemode="tozero")
    add_line(figure, line, name="spent", color=COLORS["reference"], band=False)
    last = next(s.cadence for s in reversed(steps) if s.cadence is not None)
    if last.budget is not None:
        figure.add_hline(y=last.budget, line={"color": AMBER, "width": 1.2, "dash": "dash"})
        figure.add_annotation(
            x=1, xref="paper", y=last.budget, yref="y", text=f"budget {percent(last.budget)}", showarrow=False,
            xanchor="right", yanchor="bottom", font={"color": AMBER, "size": 12},
        )  # fmt: skip
    figure.update_layout(showlegend=False)
    step_axis(figure, (s.step for s in steps))
    spent = next((v for v in reversed(line.mid) if v is not None), None)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=300,
        caption="Everything that Driftscope did since the run began, over the time that the training took. Above its "
        "budget it measures less often by itself.",
        alt=f"Share of the step time spent by Driftscope: {percent(spent) if spent is not None else UNAVAILABLE} at "
        "the end.",
    )  # fmt: skip
