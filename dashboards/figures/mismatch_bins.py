"""The mismatch by the probability of the token and by its position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import COLORS, GREY, Panel
from driftscope.dashboards.figures.rows import axes_of, new_rows
from driftscope.dashboards.series import finite, whole_of, why_unavailable
from driftscope.dashboards.wording import SUPERSCRIPT, count, number
from driftscope.mismatch.model import Bin
from driftscope.records import StepRecord

Edges = tuple[float, float | None]


@dataclass
class Pool:
    """Bins of several records, pooled: counts and sums of d, |d| and d squared."""

    count: int = 0
    total: float = 0.0
    size: float = 0.0
    square: float = 0.0

    def add(self, row: Bin) -> None:
        """Take in a bin; one without figures counts for nothing."""
        mean, size = finite(row.mean), finite(row.abs_mean)
        if mean is None or size is None or row.count <= 0:
            return
        spread = finite(row.std) or 0.0
        self.count += row.count
        self.total += row.count * mean
        self.size += row.count * size
        self.square += row.count * (spread * spread + mean * mean)

    @property
    def mean(self) -> float:
        """Mean d."""
        return self.total / self.count

    @property
    def error(self) -> float:
        """Two standard errors of the mean."""
        return 2 * math.sqrt(max(self.square / self.count - self.mean**2, 0.0) / self.count)


def by_probability(steps: Sequence[StepRecord]) -> Panel:
    """Mean d and mean |d| by the engine's probability of the token: a mismatch often sits in the rare ones."""
    return _panel(
        steps, "by_probability", _range_text, "mismatch-probability", "Mismatch by token probability",
        "probability of the token under the engine", "Rare tokens are where number formats and truncation show first.",
    )  # fmt: skip


def by_position(steps: Sequence[StepRecord]) -> Panel:
    """Mean d and mean |d| by the token's position in the completion, in octaves."""
    return _panel(
        steps, "by_octave", _octave_text, "mismatch-position", "Mismatch by position",
        "position in the completion", "A mismatch that grows with the position points to what builds up along a "
        "sequence: the cache, positions, a sliding window.",
    )  # fmt: skip


def by_progress(steps: Sequence[StepRecord]) -> Panel:
    """Mean d and mean |d| by the part of the completion that the token stands in, in tenths."""
    return _panel(
        steps, "by_decile", _decile_text, "mismatch-progress", "Mismatch from beginning to end",
        "part of the completion", "The last tenth holds the end of sequence: one that only one side counts shows "
        "there.",
    )  # fmt: skip


def pooled(found: Iterable[Sequence[Bin]]) -> dict[Edges, Pool]:
    """Bins of several records by their edges, ascending, from the first filled one to the last."""
    pools: dict[Edges, Pool] = {}
    for bins in found:
        for row in bins:
            pools.setdefault((row.low, row.high), Pool()).add(row)
    return _filled(pools)


def _filled(pools: dict[Edges, Pool]) -> dict[Edges, Pool]:
    ordered = sorted(pools, key=lambda e: (e[0], math.inf if e[1] is None else e[1]))
    filled = [i for i, edges in enumerate(ordered) if pools[edges].count]
    return {edges: pools[edges] for edges in ordered[filled[0] : filled[-1] + 1]} if filled else {}


def _pools(steps: Sequence[StepRecord], bins: str) -> tuple[dict[Edges, Pool], int]:
    """The pooled bins of a run, and the number of records that have some."""
    whole = whole_of(steps)
    if whole is not None:
        held = whole.whole.bins[bins]
        return _filled({edges: Pool(int(row[0]), *row[1:]) for edges, row in held.rows.items()}), held.records
    found = [rows for s in steps if s.mismatch is not None and (rows := getattr(s.mismatch, bins))]
    return pooled(found), len(found)


def _panel(
    steps: Sequence[StepRecord],
    bins: str,
    text: Callable[[Edges], str],
    panel_id: str,
    title: str,
    x_title: str,
    hint: str,
) -> Panel:
    pools, records = _pools(steps, bins)
    if not pools:
        why = why_unavailable(steps, "mismatch", "is_ratio")
        return Panel.missing(panel_id, title, why or "no record compares trainer and engine token by token.")
    names = [text(edges) for edges in pools]
    figure = new_rows(["nats", "tokens"], [2.4, 1], x_title=x_title)
    rows = [p if p.count else None for p in pools.values()]
    tokens = [p.count if p else 0 for p in rows]
    _add(figure, names, [p.size / p.count if p else None for p in rows], tokens, "mean |d|", COLORS["liger"], None)
    errors = [p.error if p else 0.0 for p in rows]
    _add(figure, names, [p.mean if p else None for p in rows], tokens, "mean d, ± 2 s.e.", COLORS["reference"], errors)
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.add_trace(
        go.Bar(
            x=names, y=tokens, name="tokens", marker={"color": GREY}, showlegend=False,
            hovertemplate="%{x}<br>%{y:,d} tokens<extra></extra>", **axes_of(1),
        )
    )  # fmt: skip
    for axis in (figure.layout.xaxis, figure.layout.xaxis2):
        axis.update(type="category", categoryorder="array", categoryarray=names)
        axis.update(tickangle=0 if len(names) < 7 else -40)
    figure.layout.yaxis.update(exponentformat="power", nticks=6)
    figure.layout.yaxis2.update(nticks=3, rangemode="tozero", tickformat=",d")
    total = sum(tokens)
    sizes = [p.size / p.count for p in rows if p]
    return Panel(
        id=panel_id, title=title, figure=figure, height=400,
        caption=f"d is the trainer's log-prob of a token minus the engine's, over {count(total, 'token')} of "
        f"{count(records, 'micro-batch', 'micro-batches')}. A mean d away from 0 is a bias; where it is 0, mean "
        f"|d| is noise. {hint}",
        alt=f"Mean |d| in {count(len(sizes), 'bin')} of the {x_title}: from {number(min(sizes))} to "
        f"{number(max(sizes))} nats.",
    )  # fmt: skip


def _add(
    figure: go.Figure,
    names: list[str],
    ys: list[float | None],
    tokens: list[int],
    text: str,
    color: str,
    errors: list[float] | None,
) -> None:
    bars = {"error_y": {"array": errors, "color": color, "thickness": 1.5, "width": 3}} if errors is not None else {}
    figure.add_trace(
        go.Scatter(
            x=names, y=ys, name=text, mode="lines+markers", line={"color": color, "width": 2.2}, marker={"size": 7},
            customdata=tokens, hovertemplate=f"%{{x}}<br>%{{y:.4~g}} nats, %{{customdata:,d}} tokens<extra>{text}"
            "</extra>", connectgaps=False, **bars, **axes_of(0),
        )
    )  # fmt: skip


def _range_text(edges: Edges) -> str:
    low, high = edges
    if low <= 0 and high is not None:
        return f"under {_power(high)}"
    return f"{_power(low)}–{_power(high)}" if high is not None else f"over {_power(low)}"


def _power(value: float) -> str:
    if value <= 0 or value >= 0.0009:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = value / 10.0**exponent
    power = "10" + str(exponent).translate(SUPERSCRIPT)
    return power if abs(mantissa - 1) < 0.005 else f"{mantissa:.3g}×{power}"


def _octave_text(edges: Edges) -> str:
    low, high = edges
    if high is None:
        return f"from {low:,.0f}"
    return f"{low:,.0f}" if high - low <= 1 else f"{low:,.0f}–{high - 1:,.0f}"


def _decile_text(edges: Edges) -> str:
    low, high = edges
    return f"{low * 100:.0f}–{high * 100:.0f}%" if high is not None else f"from {low * 100:.0f}%"
