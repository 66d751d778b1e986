"""The log importance sampling ratio of the tokens as a distribution, against the noise floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import AMBER, COLORS, GREY, Panel, new_figure, translucent
from driftscope.dashboards.series import finite, middle, values, why_unavailable
from driftscope.dashboards.wording import SUPERSCRIPT, count, number, percent, step_span
from driftscope.mismatch.model import HistogramBin
from driftscope.records import StepRecord

ID, TITLE = "mismatch-distribution", "Log ratio of the tokens against the noise floor"
STEPS = 10
WIDTH = 0.3
"""Least width of a bar, in units of the axis."""
FLOOR_MULTIPLE = 3.0
Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """Tokens in one interval of d."""

    low: float
    high: float
    count: int


def mismatch_distribution(steps: Sequence[StepRecord]) -> Panel:
    """The pooled histogram of the latest ten measured steps, on an axis that is linear near zero and logarithmic
    beyond (asinh of d over the noise floor). The noise floor and bfloat16's noise are drawn as normal curves.
    """
    known = [s for s in steps if s.mismatch is not None and s.mismatch.histogram]
    if not known:
        why = why_unavailable(steps, "mismatch", "is_ratio")
        return Panel.missing(ID, TITLE, why or "no record holds a histogram of the log ratio.")
    last = sorted({s.step for s in known})[-STEPS:]
    known = [s for s in known if s.step in last]
    bins = pool(b for s in known if s.mismatch is not None for b in s.mismatch.histogram)
    looks = [s for s in steps if s.canary is not None and s.step <= last[-1]]
    floors = values(looks, lambda s: s.canary.noise_floor if s.canary else None)
    floor = median(floors[-STEPS:]) if floors else None
    coarse = middle(looks[-STEPS:], lambda s: s.canary.bf16_noise if s.canary else None)
    unit = floor or _scale(bins)
    bars = merge(bins, unit)
    total = sum(b.count for b in bars)
    figure = new_figure(y_title="density of tokens", x_title="log ratio of a token, nats")
    _add_bars(figure, bars, total, unit)
    edge = max(abs(v) for b in bars for v in (b.low, b.high))
    for sigma, text, color in ((floor, "noise floor", GREY), (coarse, "bfloat16 noise", AMBER)):
        if sigma:
            _add_normal(figure, sigma, unit, f"{text} {number(sigma)}", color)
            edge = max(edge, 3.5 * sigma)
    _axis(figure, unit, edge)
    beyond = _beyond(bins, floor, total)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=400,
        caption=f"{count(total, 'token')} of {step_span(last)}. 0 means that trainer and engine give a token the same "
        "probability. The axis is linear near 0 and logarithmic beyond, so a spread far wider than the floor shows as "
        "a hump on either side; a hump on one side only is a bias. "
        + (f"The grey curve is how far the trainer differs from itself when the same tokens are scored twice, "
           f"{number(floor)} nats (rms): {percent(beyond)} of the tokens are more than {FLOOR_MULTIPLE:g} times that "
           "away from 0." if floor and beyond is not None else
           "Unavailable: the noise floor, which the canary measures." if not floors else
           "The noise floor that was measured is exactly 0, so there is no curve to compare with.")
        + (" Amber is what computing in bfloat16 makes in this model." if coarse else ""),
        alt=f"Histogram of the log ratio of {count(total, 'token')}"
        + (f"; noise floor {number(floor)} nats; {percent(beyond)} of the tokens beyond {FLOOR_MULTIPLE:g} times it."
           if floor else "; noise floor unavailable."),
    )  # fmt: skip


def pool(bins: Iterable[HistogramBin]) -> list[Bar]:
    """Histograms of several records added up, ascending; an open bin ends where its mirror image would."""
    found: dict[Interval, int] = {}
    for b in bins:
        edges = _edges(b)
        if edges is not None and b.count > 0:
            found[edges] = found.get(edges, 0) + b.count
    return [Bar(low, high, n) for (low, high), n in sorted(found.items())]


def _edges(b: HistogramBin) -> Interval | None:
    low, high = finite(b.low), finite(b.high)
    if low is None and high is None:
        return None
    if low is None:
        low = 2 * high if high is not None and high < 0 else (high or 0.0) - 1
    if high is None:
        high = 2 * low if low > 0 else low + 1
    return (low, high) if low < high else None


def _scale(bars: Sequence[Bar]) -> float:
    """Where there is no noise floor: a tenth of the typical size of d."""
    sizes = sorted((max(abs(b.low), abs(b.high)), b.count) for b in bars)
    half, seen = sum(n for _, n in sizes) / 2, 0
    for size, n in sizes:
        seen += n
        if seen >= half:
            return size / 10
    return 1.0


def merge(bars: Sequence[Bar], unit: float) -> list[Bar]:
    """Neighbouring bins put together until each is ``WIDTH`` wide on the axis; gaps between them stay gaps.

    The bins get ever finer towards 0: one token in a bin that is hardly there would be a spike of density.
    """
    out: list[Bar] = []
    for b in bars:
        joined = out[-1] if out else None
        if joined is not None and _narrow(joined, b, unit):
            out[-1] = Bar(joined.low, b.high, joined.count + b.count)
        else:
            out.append(b)
    if len(out) > 1 and _span(out[-1].low, out[-1].high, unit) < WIDTH and _narrow(out[-2], out[-1], unit, last=True):
        a, b = out[-2:]
        out[-2:] = [Bar(a.low, b.high, a.count + b.count)]
    return [_widened(b, unit) for b in out]


def _narrow(a: Bar, b: Bar, unit: float, *, last: bool = False) -> bool:
    """Whether ``b`` belongs to the unfinished bar ``a``: it is thin, and ``b`` follows without a wide gap."""
    near = _span(a.high, b.low, unit) < WIDTH
    return near and (last or _span(a.low, a.high, unit) < WIDTH)


def _widened(bar: Bar, unit: float) -> Bar:
    """A bar that stands alone and is thinner than it may be, widened about its middle."""
    low, high = (math.asinh(v / unit) for v in (bar.low, bar.high))
    if high - low >= WIDTH:
        return bar
    middle_ = (low + high) / 2
    start, end = (unit * math.sinh(middle_ + side * WIDTH / 2) for side in (-1, 1))
    return Bar(start, end, bar.count)


def _span(low: float, high: float, unit: float) -> float:
    return math.asinh(high / unit) - math.asinh(low / unit)


def _add_bars(figure: go.Figure, bars: Sequence[Bar], total: int, unit: float) -> None:
    spans = [(math.asinh(b.low / unit), math.asinh(b.high / unit)) for b in bars]
    figure.add_trace(
        go.Bar(
            x=[(a + b) / 2 for a, b in spans], width=[b - a for a, b in spans],
            y=[bar.count / total / (b - a) for bar, (a, b) in zip(bars, spans, strict=True)],
            name="tokens", marker={"color": translucent(COLORS["liger"], 0.75), "line": {"width": 0}},
            customdata=[[bar.count, percent(bar.count / total), number(bar.low), number(bar.high)] for bar in bars],
            hovertemplate="%{customdata[2]} to %{customdata[3]} nats<br>%{customdata[0]:,d} tokens, %{customdata[1]}"
            "<extra></extra>",
        )
    )  # fmt: skip


def _add_normal(figure: go.Figure, sigma: float, unit: float, text: str, color: str) -> None:
    """The density of a normal d of that spread, on the transformed axis."""
    end = math.asinh(4.5 * sigma / unit)
    xs = [end * (i / 60 - 1) for i in range(121)]
    ys = [
        unit * math.cosh(u) / sigma * math.exp(-0.5 * (unit * math.sinh(u) / sigma) ** 2) / math.sqrt(2 * math.pi)
        for u in xs
    ]
    figure.add_trace(
        go.Scatter(
            x=xs, y=ys, name=text, mode="lines", line={"color": color, "width": 2}, fill="tozeroy",
            fillcolor=translucent(color, 0.12), hovertemplate=f"{text} nats<extra></extra>",
        )
    )  # fmt: skip


def _axis(figure: go.Figure, unit: float, edge: float) -> None:
    """Ticks at 0 and at powers of ten of either sign, no more than about five a side."""
    end = math.asinh(edge / unit)
    low, high = math.ceil(math.log10(unit) + 0.3), math.floor(math.log10(edge) + 1e-9)
    powers = list(range(low, high + 1))
    stride = max(1, math.ceil(len(powers) / 4))
    powers = powers[::-1][::stride] or [high]
    ticks = [(0.0, "0")]
    for p in powers:
        text = f"{10.0**p:g}" if -3 < p < 4 else "10" + str(p).translate(SUPERSCRIPT)
        at = math.asinh(10.0**p / unit)
        ticks += [(at, text), (-at, "−" + text)]
    ticks.sort()
    figure.layout.xaxis.update(
        tickmode="array", tickvals=[t for t, _ in ticks], ticktext=[t for _, t in ticks],
        range=[-end * 1.04 - 0.1, end * 1.04 + 0.1],
    )  # fmt: skip
    figure.add_vline(x=0, line={"color": GREY, "width": 1})
    figure.update_layout(bargap=0)
    figure.layout.yaxis.update(rangemode="tozero", nticks=5)


def _beyond(bars: Sequence[Bar], floor: float | None, total: int) -> float | None:
    """Share of tokens in bins that lie wholly beyond the multiple of the noise floor."""
    if not floor:
        return None
    limit = FLOOR_MULTIPLE * floor
    return sum(b.count for b in bars if b.low >= limit or b.high <= -limit) / total
