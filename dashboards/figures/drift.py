"""The watched series and what their detectors make of them, a row each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import COLORS, GREY, RED, Panel, label, step_axis, translucent
from driftscope.dashboards.figures.lines import add_line
from driftscope.dashboards.figures.rows import axes_of, name, new_rows
from driftscope.dashboards.series import POINT_LIMIT, Line, by_step, finite, thin_together, whole_of, why_unavailable
from driftscope.dashboards.wording import clean, count, series_label, step_span
from driftscope.records import AlertRecord, DriftRecord, StepRecord

ID, TITLE = "drift", "Watched series and their detectors"
RULE = "DS211"
SHOWN = 8
EPISODES = 40


@dataclass(frozen=True)
class Episode:
    """A stretch of steps in which a series was in alarm. ``started``: estimated step at which it began."""

    started: int
    found: int
    last: int
    kind: str | None


def drift(steps: Sequence[StepRecord], alerts: Sequence[AlertRecord] = ()) -> Panel:
    """Value, level and floor of each watched series; warm-up shaded grey, episodes red, their alarms marked.

    alerts: those of the run; of rule DS211 the steps are marked on the series that the evidence names.
    """
    names = list(dict.fromkeys(n for s in steps for n in s.drift))
    known = [n for n in names if any(finite(s.drift[n].value) is not None for s in steps if n in s.drift)]
    if not known:
        why = why_unavailable(steps, "drift", "detect")
        return Panel.missing(ID, TITLE, why or "no record holds a watched series.")
    found = {n: episodes(steps, n) for n in known}
    ranked = sorted(known, key=lambda n: (not found[n], known.index(n)))  # with more than fit, those in alarm first
    shown = [n for n in known if n in ranked[:SHOWN]]
    figure = new_rows([""] * len(shown), [1.0] * len(shown))
    told = [a for a in alerts if a.rule == RULE]
    for row, series in enumerate(shown):
        _add(figure, row, series, steps, found[series], _alerts_on(series, known, told), 2 * POINT_LIMIT // len(shown))
    step_axis(figure, (s.step for s in steps))
    bottom = figure.layout[name("xaxis", len(shown) - 1)]
    for key in ("range", "tickformat", "dtick"):
        bottom[key] = figure.layout.xaxis[key]
    height = 110 + 165 * len(shown)
    figure.update_layout(legend={"y": 1 + 22 / (height - 60)})  # above the name of the first row
    total = sum(map(len, found.values()))
    left = f" {count(len(known) - len(shown), 'further series', 'further series')} not shown." if len(known) > len(
        shown) else ""  # fmt: skip
    return Panel(
        id=ID, title=TITLE, figure=figure, height=height,
        caption="The dashed line is the level that the detectors take for normal, the band around it what the noise "
        "floor allows: nothing inside it alarms. Grey is warm-up, in which nothing is judged; red is an episode, from "
        f"the step at which it is estimated to have begun, and the cross the step at which it was found. "
        f"{count(total, 'episode') if total else 'No episode'} in this run." + left,
        alt=f"{count(len(shown), 'watched series', 'watched series')} over the steps. "
        + "; ".join(_words(n, found[n]) for n in shown) + ".",
    )  # fmt: skip


def episodes(steps: Sequence[StepRecord], series: str) -> list[Episode]:
    """The stretches in which a series was in alarm, in order; another kind inside one stays the same episode."""
    whole = whole_of(steps)
    if whole is not None:
        watch = whole.whole.watched.get(series)
        return [Episode(*episode) for episode in watch.episodes] if watch is not None else []
    out: list[Episode] = []
    open_ = False
    for record in sorted((s for s in steps if series in s.drift), key=lambda s: (s.step, s.micro_step)):
        seen = record.drift[series]
        if seen.state != "alarm":
            open_ = False
        elif open_:
            last = out[-1]
            out[-1] = Episode(last.started, last.found, record.step, seen.kind or last.kind)
        else:
            out.append(Episode(_started(seen, record.step), record.step, record.step, seen.kind))
            open_ = True
    return out


def _started(seen: DriftRecord, step: int) -> int:
    return min(seen.started, step) if seen.started is not None else step


def _alerts_on(series: str, known: Sequence[str], told: Sequence[AlertRecord]) -> list[int]:
    """Steps of the alerts that name the series; of those that name none, all."""
    out = []
    for alert in told:
        text = f"{alert.title} {alert.evidence}"
        named = [n for n in known if n in text or series_label(n) in text]
        if series in named or not named:
            out.append(alert.step)
    return sorted(set(out))


def _add(
    figure: go.Figure,
    row: int,
    series: str,
    steps: Sequence[StepRecord],
    found: Sequence[Episode],
    alerted: Sequence[int],
    limit: int,
) -> None:
    """One row: zones below, then the band of the floor, the level, the value, and the marks."""
    records = [s for s in steps if series in s.drift]
    value = by_step(records, lambda s: s.drift[series].value)
    level = by_step(records, lambda s: s.drift[series].baseline)
    floor = by_step(records, lambda s: s.drift[series].floor)
    value, level, floor = thin_together(_aligned(value, level, floor), max(120, limit), lead=1)
    before = len(figure.data)
    band = _band(level, floor)
    color = COLORS["reference"]
    if not band.empty:
        add_line(figure, band, name="floor", color=GREY, width=0, band=True)
        figure.data = figure.data[:-1]  # the band without a line of its own
    text = label(series_label(series))
    add_line(figure, level, name="normal level", color=GREY, width=1.6, dash="dash", band=False)
    add_line(figure, value, name=text, color=color, width=2.0, band=False)
    _marks(figure, value, found, alerted)
    first = row == 0
    for trace in figure.data[before:]:
        trace.update(**axes_of(row), showlegend=bool(first and trace.name in LEGEND))
    _zones(figure, row, steps, series, found)
    axis = figure.layout[name("yaxis", row)]
    figure.add_annotation(
        x=0, xref="paper", y=axis.domain[1], yref="paper", text=text, showarrow=False, xanchor="left",
        yanchor="bottom", font={"size": 13},
    )  # fmt: skip
    axis.update(nticks=4, exponentformat="power", title=None)


LEGEND = ("normal level", "alarm found", "alert")


def _aligned(lead: Line, *others: Line) -> list[Line]:
    """The lines over the steps of the first one: holes where another has no value."""
    out = [lead]
    for line in others:
        where = {x: i for i, x in enumerate(line.x)}
        mid, low, high = (
            [column[where[x]] if x in where else None for x in lead.x] for column in (line.mid, line.low, line.high)
        )
        out.append(Line(list(lead.x), mid, low, high))
    return out


def _band(level: Line, floor: Line) -> Line:
    """The level plus and minus the floor."""
    low, high = [
        [a + side * b if a is not None and b is not None else None for a, b in zip(level.mid, floor.mid, strict=True)]
        for side in (-1, 1)
    ]
    return Line(level.x, level.mid, low, high)


def _marks(figure: go.Figure, value: Line, found: Sequence[Episode], alerted: Sequence[int]) -> None:
    at = {x: v for x, v in zip(value.x, value.mid, strict=True) if v is not None}
    if not at:
        return

    known = sorted(at)

    def y(step: int) -> float:
        i = bisect_left(known, step)  # thinning may have left the step out
        return at[min(known[max(0, i - 1) : i + 1], key=lambda x: (abs(x - step), x))]

    if found:
        kinds = [f"{label(clean(e.kind or 'alarm'))}, began about step {e.started}" for e in found]
        figure.add_trace(
            go.Scatter(
                x=[e.found for e in found], y=[y(e.found) for e in found], mode="markers", name="alarm found",
                marker={"symbol": "x", "size": 10, "color": RED}, customdata=kinds,
                hovertemplate="step %{x:,d}: %{customdata}<extra></extra>",
            )
        )  # fmt: skip
    if alerted:
        figure.add_trace(
            go.Scatter(
                x=list(alerted), y=[y(s) for s in alerted], mode="markers", name="alert",
                marker={"symbol": "circle-open", "size": 15, "color": RED, "line": {"width": 2}},
                hovertemplate=f"{RULE} at step %{{x:,d}}<extra></extra>",
            )
        )  # fmt: skip


def _zones(figure: go.Figure, row: int, steps: Sequence[StepRecord], series: str, found: Sequence[Episode]) -> None:
    zones = [(start - 0.5, end + 0.5, GREY, 0.13) for start, end in _warm_ups(steps, series)[:EPISODES]]
    zones += [(e.started - 0.5, e.last + 0.5, RED, 0.12) for e in found[:EPISODES]]
    for start, end, color, alpha in zones:
        figure.add_shape(
            type="rect", x0=start, x1=end, y0=0, y1=1, xref=name("x", row), yref=f"{name('y', row)} domain",
            fillcolor=translucent(color, alpha), line={"width": 0}, layer="below",
        )  # fmt: skip


def _warm_ups(steps: Sequence[StepRecord], series: str) -> list[tuple[int, int]]:
    """The stretches of warm-up: at the beginning, and after a resume that forgot."""
    whole = whole_of(steps)
    if whole is not None:
        watch = whole.whole.watched.get(series)
        return [(first, last) for first, last in watch.warm] if watch is not None else []
    out: list[tuple[int, int]] = []
    open_ = False
    for record in sorted((s for s in steps if series in s.drift), key=lambda s: (s.step, s.micro_step)):
        warm = record.drift[series].state == "warm-up"
        if warm and open_:
            out[-1] = (out[-1][0], record.step)
        elif warm:
            out.append((record.step, record.step))
        open_ = warm
    return out


def _words(series: str, found: Sequence[Episode]) -> str:
    if not found:
        return f"{series_label(series)}: quiet"
    return f"{series_label(series)}: {count(len(found), 'episode')}, found at {step_span(e.found for e in found)}"
