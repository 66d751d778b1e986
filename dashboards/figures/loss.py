"""Loss of every path over the steps."""

from __future__ import annotations

from collections.abc import Sequence

from driftscope.dashboards.figures.base import Panel, new_figure, step_axis
from driftscope.dashboards.figures.lines import add_path
from driftscope.dashboards.series import by_step, middle, path_value, paths_in, why_unavailable
from driftscope.dashboards.wording import number, path_label
from driftscope.records import StepRecord

ID, TITLE = "loss", "Loss of every path"


def loss(steps: Sequence[StepRecord]) -> Panel:
    """The loss that each path computes on the same micro-batches."""
    lines = {p: by_step(steps, path_value(p, "loss")) for p in paths_in(steps)}
    lines = {p: line for p, line in lines.items() if not line.empty}
    if not lines:
        why = why_unavailable(steps, "loss", "paths") or "no record holds a loss."
        return Panel.missing(ID, TITLE, why)
    figure = new_figure(y_title="loss")
    figure.layout.yaxis.update(tickformat="~g", zeroline=True)
    for path, line in sorted(lines.items(), key=lambda item: item[0] != "reference"):
        add_path(figure, line, path, steps[-1].live)
    step_axis(figure, (s.step for s in steps))
    medians = ", ".join(f"{path_label(p)} {number(middle(steps, path_value(p, 'loss')))}" for p in lines)
    return Panel(
        id=ID, title=TITLE, figure=figure,
        caption="The number that each path would log for the same micro-batches. In GRPO the loss hovers around "
        "zero and says "
        "little about progress: what counts here is whether the paths agree.",
        alt=f"Loss over the steps. Medians: {medians}.",
    )  # fmt: skip
