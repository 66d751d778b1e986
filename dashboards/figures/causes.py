"""What the gap is made of: factors that multiply from 1x to the whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import plotly.graph_objects as go

from driftscope.dashboards.figures.base import COLORS, GREY, RED, Panel, label, new_figure, set_log
from driftscope.dashboards.series import finite, getter, middle, whole_of, why_unavailable
from driftscope.dashboards.wording import cause_label, count, factor
from driftscope.reading.events import CauseTally
from driftscope.records import StepRecord

UNEXPLAINED = "#b5539c"
AGREEMENT = 1.01
ID, TITLE = "causes", "What the gap is made of"


@dataclass(frozen=True)
class CauseSummary:
    """A cause over the whole run: median factor and share, the range of the factor, the latest detail."""

    id: str
    label: str
    factor: float | None
    low: float | None
    high: float | None
    share: float | None
    seen: int
    detail: str | None


def summarize_causes(steps: Sequence[StepRecord]) -> list[CauseSummary]:
    """The causes of all records, the largest effect first (by |log factor|); "unexplained" last.

    A record that attributes its gap and does not name a cause counts as a factor of 1 and a share of 0 for it.
    """
    whole = whole_of(steps)
    if whole is not None:
        return sorted((_of_tally(c, t, whole.whole.causes.attributed) for c, t in whole.whole.causes.rows.items()),
                      key=_rank)  # fmt: skip
    factors: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    details: dict[str, str | None] = {}
    seen: dict[str, int] = defaultdict(int)
    for record in steps:
        rows = [(c.id, c.factor, c.share, c.detail) for c in record.causes]
        if record.unexplained is not None:
            rows.append(("unexplained", record.unexplained.factor, record.unexplained.share, None))
        for cause, f, share, detail in rows:
            seen[cause] += 1
            details[cause] = detail or details.get(cause)
            if finite(f) is not None and f is not None and f > 0:
                factors[cause].append(f)
            if finite(share) is not None:
                shares[cause].append(share)
    attributed = sum(1 for s in steps if s.causes or s.unexplained is not None)
    for cause, times in seen.items():
        absent = max(0, attributed - times)
        if factors[cause]:  # a factor that was never known stays unknown
            factors[cause] += [1.0] * absent
        shares[cause] += [0.0] * absent
    rows_out = [
        CauseSummary(
            id=c, label=cause_label(c), factor=median(factors[c]) if factors[c] else None,
            low=min(factors[c], default=None), high=max(factors[c], default=None),
            share=median(shares[c]) if shares[c] else None, seen=seen[c], detail=details[c],
        )
        for c in seen
    ]  # fmt: skip
    return sorted(rows_out, key=_rank)


def _of_tally(cause: str, tally: CauseTally, attributed: int) -> CauseSummary:
    """The row of a cause from the sums over a long run."""
    absent = max(0, attributed - tally.seen)
    factors, shares = tally.medians(absent)
    low, high = tally.factors.extremes() or (None, None)
    if absent and low is not None and high is not None:
        low, high = min(low, 1.0), max(high, 1.0)
    return CauseSummary(
        id=cause, label=cause_label(cause), factor=factors, low=low, high=high, share=shares, seen=tally.seen,
        detail=tally.detail,
    )  # fmt: skip


def _attributed(steps: Sequence[StepRecord]) -> int:
    """Records that take their gap apart."""
    whole = whole_of(steps)
    return whole.whole.causes.attributed if whole is not None else sum(
        1 for s in steps if s.causes or s.unexplained
    )  # fmt: skip


def _rank(row: CauseSummary) -> tuple[bool, float, str]:
    return row.id == "unexplained", -abs(math.log(row.factor)) if row.factor else 0.0, row.id


def causes(steps: Sequence[StepRecord]) -> Panel:
    """A waterfall on a logarithmic axis: from 1x, each cause's median factor, to the median gap.

    Medians are taken one cause at a time and a factor is that cause's effect alone, so their product can miss the
    median gap. What is missing by more than 2% gets a bar of its own; it is never folded into a cause.
    """
    rows = [r for r in summarize_causes(steps) if r.factor is not None]
    total = middle(steps, getter("gap.grad_norm_ratio"))
    if total is not None and total <= 0:
        total = None
    if not rows:
        why = why_unavailable(steps, "causes", "attribution")
        if why is None and total is not None and 1 / AGREEMENT < total < AGREEMENT:
            agreed = f"No cause is on record: the median gap is {factor(total)}, so there is nothing to take apart."
            return Panel(id=ID, title=TITLE, caption="", unavailable=agreed)
        return Panel.missing(ID, TITLE, why or "no record attributes a gap between two paths.")
    bars = [(r.label, r.factor, UNEXPLAINED if r.id == "unexplained" else COLORS["liger"]) for r in rows if r.factor]
    product = math.prod(f for _, f, _ in bars)
    between = ""
    if total is not None and abs(math.log(total / product)) > 0.02:
        bars.append(("difference of medians", total / product, GREY))
        between = " Medians taken one at a time need not multiply exactly to the median gap: the grey bar is the rest."
    figure = _draw(bars, total if total is not None else product)
    named = [r for r in rows if r.id != "unexplained"]
    words = "; ".join(f"{label_} {factor(f)}" for label_, f, _ in bars)
    return Panel(
        id=ID, title=TITLE, figure=figure, height=150 + 52 * (len(bars) + 2),
        caption="Read from the top: start at the reference (1×) and multiply by each cause in turn until the "
        "candidate's "
        "gradient is reached. A bar to the right makes the candidate larger, one to the left smaller. "
        f"Median factors over "
        f"{count(_attributed(steps), 'micro-batch', 'micro-batches')}; "
        "what no known cause explains has a bar of its own." + between,
        alt=f"Waterfall of {count(len(named), 'cause')}, from 1× to {factor(total or product)}: {words}.",
    )  # fmt: skip


def _draw(bars: list[tuple[str, float, str]], total: float) -> go.Figure:
    level = 1.0
    spans: list[tuple[str, float, float, str, str]] = []
    for name, f, color in bars:
        spans.append((name, level, level * f, color, factor(f)))
        level *= f
    spans.append(
        ("candidate / reference", 1.0, total, RED if not 1 / 1.5 < total < 1.5 else COLORS["corrected"], factor(total))
    )
    edges = [v for s in spans for v in s[1:3]]
    room = max(1.15, (max(edges) / min(edges)) ** 0.2)
    figure = new_figure(x_title="multiplied so far, 1× = reference", y_title="")
    names = [_wrap(label(s[0])) for s in spans]
    tiny = room**0.02  # a factor of 1 is still drawn as a hairline
    for name, start, end, color, text in spans:
        low, high = min(start, end), max(start, end)
        figure.add_trace(
            go.Bar(
                y=[_wrap(label(name))], base=[low], x=[max(high - low, low * (tiny - 1))], orientation="h", width=0.55,
                marker={"color": color}, text=[text], textposition="outside", cliponaxis=False, showlegend=False,
                customdata=[[text, f"{start:.4g}", f"{end:.4g}"]],
                hovertemplate="%{customdata[0]}: from %{customdata[1]}× to %{customdata[2]}×<extra></extra>",
            )
        )  # fmt: skip
    for i, span in enumerate(spans[:-1]):
        figure.add_shape(
            type="line",
            x0=span[2],
            x1=span[2],
            y0=i + 0.28,
            y1=i + 0.72,
            line={"color": GREY, "width": 1, "dash": "dot"},
        )
    set_log(figure.layout.xaxis, [min(edges), max(edges) * room], room=room**0.3, suffix="×")
    figure.layout.yaxis.update(
        autorange="reversed",
        categoryorder="array",
        categoryarray=list(dict.fromkeys(names)),
        title=None,
        tickfont={"size": 13},
    )
    figure.add_vline(x=1, line={"color": GREY, "width": 1.5})
    figure.update_layout(bargap=0.4, showlegend=False, barmode="overlay")
    return figure


def _wrap(text: str, width: int = 18) -> str:
    """Break a label at spaces into lines of about ``width`` characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)
