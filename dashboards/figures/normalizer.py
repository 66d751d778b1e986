"""The normaliser ledger: what each path claims to divide by, what its coefficients imply, what is intended."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import Panel, color_of, name_of, new_figure, set_log, step_axis
from driftscope.dashboards.figures.lines import DASHES, WIDTHS
from driftscope.dashboards.series import Line, finite, middle, path_value, paths_in, thin, why_unavailable
from driftscope.dashboards.wording import number, path_label
from driftscope.records import StepRecord

ID, TITLE = "normalizer", "Normaliser ledger"


def window_position(record: StepRecord) -> float:
    """Where a micro-batch stands on the step axis: the window of step s spans s - 0.5 to s + 0.5."""
    size = max(record.accumulation or 1, record.micro_step + 1)
    return record.step - 0.5 + (record.micro_step + 0.5) / size


def normalizer(steps: Sequence[StepRecord]) -> Panel:
    """Claimed normaliser (lines) and measured normaliser (open markers) per micro-batch, for each path."""
    ranks = sorted({s.rank for s in steps})
    records = sorted((s for s in steps if s.paths and s.rank == ranks[0]), key=window_position) if ranks else []
    claimed = {p: _line(records, p, "normalizer") for p in paths_in(records)}
    measured = {p: _line(records, p, "normalizer_measured") for p in paths_in(records)}
    seen = [v for line in (*claimed.values(), *measured.values()) for v in line.mid if v is not None]
    if not seen:
        why = why_unavailable(steps, "normalizer", "paths")
        return Panel.missing(
            ID, TITLE, why or "no record holds a normaliser (it is not one number for every loss type)."
        )
    figure = new_figure(y_title="normaliser (divisor of the loss)")
    if min(seen) > 0 and max(seen) / min(seen) > 20:
        set_log(figure.layout.yaxis, seen)
    else:
        figure.layout.yaxis.update(rangemode="tozero")
    live = steps[-1].live
    for path in sorted(claimed, key=lambda p: p != "reference"):
        _add(figure, path, claimed[path], measured[path], live)
    step_axis(figure, (s.step for s in records))
    typical = steps if len(ranks) == 1 else records
    medians = [
        f"{path_label(p)} claims {number(middle(typical, path_value(p, 'normalizer')))}, measured "
        f"{number(middle(typical, path_value(p, 'normalizer_measured')))}"
        for p in claimed
    ]
    one_rank = f" Rank {ranks[0]} of {len(ranks)} ranks is shown." if len(ranks) > 1 else ""
    return Panel(
        id=ID,
        title=TITLE,
        figure=figure,
        caption="The loss sums over tokens and divides by this number. Lines are what each path claims per "
        "micro-batch, open markers "
        "what its coefficients imply; the oracle's dotted line is what the configuration intends. A line that jumps "
        "between micro-batches weighs tokens by the micro-batch they happen to fall into." + one_rank,
        alt="Normaliser per micro-batch. Medians: " + "; ".join(medians) + ".",
    )


def _line(records: Sequence[StepRecord], path: str, field: str) -> Line:
    get = path_value(path, field)
    mid = [finite(get(s)) for s in records]
    return thin(Line(x=[window_position(s) for s in records], mid=mid, low=list(mid), high=list(mid)))


def _add(figure: go.Figure, path: str, claimed: Line, measured: Line, live: str) -> None:
    name, color = name_of(path, live), color_of(path)
    if not claimed.empty:
        mode = "lines" if sum(v is not None for v in claimed.mid) > 1 else "markers"
        figure.add_trace(
            go.Scatter(
                x=claimed.x,
                y=claimed.mid,
                name=name,
                legendgroup=name,
                mode=mode,
                line={"color": color, "width": WIDTHS.get(path, 2), "dash": DASHES.get(path, "solid"), "shape": "hvh"},
                opacity=0.55 if path == "reference" else 1,
                hovertemplate=f"step %{{x:.2f}}<br>claimed %{{y:.4~g}}<extra>{name}</extra>",
            )
        )
    if not measured.empty:
        figure.add_trace(
            go.Scatter(
                x=measured.x,
                y=measured.mid,
                name=name + ", measured",
                legendgroup=name,
                mode="markers",
                showlegend=claimed.empty,
                marker={"color": color, "size": 6, "symbol": "circle-open", "line": {"width": 1.3}},
                hovertemplate=f"step %{{x:.2f}}<br>measured %{{y:.4~g}}<extra>{name}</extra>",
            )
        )
