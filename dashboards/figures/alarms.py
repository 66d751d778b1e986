"""The alerts of a long run: how many of each rule in each stretch of it."""

from __future__ import annotations

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import AMBER, GREY, RED, Panel, label, new_figure
from driftscope.dashboards.wording import clean, count
from driftscope.reading.alerts import Alerts
from driftscope.records import SEVERITIES

ID, TITLE = "alarms", "Every alert, by rule and stretch of the run"
TONES = {"info": GREY, "warning": AMBER, "critical": RED}
SHOWN = 40


def alarms(alerts: Alerts) -> Panel | None:
    """A dot for each rule and stretch in which it fired, as large as it did so often; the worst severity's colour."""
    rules = sorted(alerts.rules.items(), key=lambda item: (-item[1].rank, -item[1].count, item[0]))[:SHOWN]
    if not rules:
        return None
    starts, width = alerts.stretches.starts(), alerts.stretches.width
    most = max(sum(column) for _, rule in rules for column in zip(*rule.by_stretch, strict=True))
    figure = new_figure(y_title="")
    for i, severity in enumerate(SEVERITIES):
        dots = []
        for name, rule in rules:
            for at, found in enumerate(zip(*rule.by_stretch, strict=True)):
                if sum(found) and max(k for k, n in enumerate(found) if n) == i:
                    span = f"steps {starts[at]:,} to {starts[at] + width - 1:,}"
                    dots.append((starts[at] + (width - 1) / 2, label(clean(name)), sum(found), span))
        if dots:
            figure.add_trace(
                go.Scatter(
                    x=[d[0] for d in dots], y=[d[1] for d in dots], mode="markers", name=severity,
                    marker={"color": TONES[severity], "size": [5 + 13 * (d[2] / most) ** 0.5 for d in dots]},
                    customdata=[[f"{d[2]:,}", d[3]] for d in dots],
                    hovertemplate="%{y}: %{customdata[0]} alerts, %{customdata[1]}<extra></extra>",
                )
            )  # fmt: skip
    names = [label(clean(name)) for name, _ in rules]
    figure.layout.yaxis.update(
        title=None, autorange="reversed", type="category", categoryorder="array", categoryarray=names
    )
    figure.layout.xaxis.update(tickformat=",d")
    total = sum(rule.count for rule in alerts.rules.values())
    words = "; ".join(f"{clean(name)} {rule.count:,}" for name, rule in rules)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=130 + 26 * len(rules),
        caption=f"All {count(total, 'alert')} of the run, in stretches of {count(width, 'step')}: the larger the dot, "
        "the more often the rule fired there; its colour is that of the worst.",
        alt=f"Alerts by rule and stretch of the run: {words}.",
    )  # fmt: skip
