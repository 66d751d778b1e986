"""The importance sampling ratio over the steps, raw and as applied."""

from __future__ import annotations

from collections.abc import Sequence

from driftscope.dashboards.figures.base import (
    AMBER,
    COLORS,
    GREY,
    Panel,
    dropped_note,
    mark_level,
    new_figure,
    set_log,
    step_axis,
)
from driftscope.dashboards.figures.lines import add_band, add_line
from driftscope.dashboards.series import Field, Getter, Line, by_step, getter, middle, why_unavailable
from driftscope.dashboards.wording import clean, number
from driftscope.records import RatioStats, StepRecord

KEPT_MASS = getter("is_ratio.kept_mass")
ID, TITLE = "is-ratio", "Importance sampling ratio over the steps"


def ratio_stats(record: StepRecord, which: str) -> RatioStats | None:
    """``raw``, ``raw_token`` or ``applied`` of a record, or None."""
    return getattr(record.is_ratio, which) if record.is_ratio is not None else None


def ratio_value(which: str, figure: str) -> Getter:
    """A getter for a statistic (``mean``, ``min``, a quantile such as ``p50``) of one of the ratios."""
    if figure.startswith("p"):
        return Field(("is_ratio", which, "quantiles", figure))
    return Field(("is_ratio", which, figure))


def ratio_time(steps: Sequence[StepRecord]) -> Panel:
    """Mean of the raw and of the applied ratio, with min-max range and p05-p95 range; the cap; the kept mass."""
    lines = {
        "raw": (_spread(steps, "raw"), COLORS["reference"], 5.0, "solid"),
        "applied by the loss": (_spread(steps, "applied"), COLORS["liger"], 2.0, "solid"),
        "raw, per token": (_spread(steps, "raw_token"), COLORS["corrected"], 2.0, "dash"),
    }
    kept = by_step(steps, KEPT_MASS, log=True)
    drawn = {name: entry for name, entry in lines.items() if not entry[0][0].empty}
    if not drawn and kept.empty:
        note = next((s.is_ratio.note for s in reversed(steps) if s.is_ratio and s.is_ratio.note), None)
        why = why_unavailable(steps, "is_ratio", "sampling_logps") or (clean(note) if note else None)
        return Panel.missing(ID, TITLE, why or "no record holds a ratio (did the sampler return log-probs?).")
    figure = new_figure(y_title="ratio, policy / sampler")
    for name, ((mean, inner), color, width, dash) in drawn.items():
        add_band(figure, mean, name=name, color=color, alpha=0.1)
        add_band(figure, inner, name=name, color=color, alpha=0.1)
        add_line(figure, mean, name=name, color=color, width=width, dash=dash, band=False)
    if not kept.empty:
        add_line(figure, kept, name="kept probability mass", color=GREY, width=2.0, dash="dot", band=False)
    cap = middle(steps, getter("is_ratio.cap"))
    figure.add_hline(y=1, line={"color": GREY, "width": 1.2})
    if cap is not None and cap > 0:
        mark_level(figure, cap, f"cap {cap:g}", AMBER)
    bounds = [v for mean, _ in (e[0] for e in drawn.values()) for v in (*mean.low, *mean.high, *mean.mid)]
    set_log(figure.layout.yaxis, [*bounds, *kept.mid, cap, 1.0], room=1.8)
    step_axis(figure, (s.step for s in steps))
    applied = middle(steps, ratio_value("applied", "mean"))
    raw = middle(steps, ratio_value("raw", "mean"))
    mass = middle(steps, KEPT_MASS)
    kept_words = (
        f" The kept mass, {number(mass)} here, is what top_p, top_k or min_p leaves of the distribution."
        if mass
        else ""
    )
    return Panel(
        id=ID, title=TITLE, figure=figure, height=420,
        caption="The policy's probability of the sampled text over the sampler's; 1 means that trainer and sampler "
        "agree. "
        "Lines are means, the dark band holds the middle 90%, the light band everything." + kept_words
        + dropped_note(entry[0][0] for entry in drawn.values()),
        alt=f"Importance sampling ratio over the steps, logarithmic. Median of the means: raw {number(raw)}, applied "
        f"{number(applied)}; kept mass {number(mass)}.",
    )  # fmt: skip


def _spread(steps: Sequence[StepRecord], which: str) -> tuple[Line, Line]:
    """(mean with min and max, mean with p05 and p95). A zero at the bottom becomes the lowest positive value known.

    The second stands at the steps whose quantiles are on record.
    """
    mean = by_step(steps, ratio_value(which, "mean"), log=True)
    return _between(steps, which, mean, "min", "max"), _between(steps, which, mean, "p05", "p95")


def _between(steps: Sequence[StepRecord], which: str, mean: Line, low: str, high: str) -> Line:
    bottom, top = by_step(steps, ratio_value(which, low)), by_step(steps, ratio_value(which, high), log=True)
    floor = min((v for v in (*top.low, *bottom.low) if v is not None and v > 0), default=None)
    lows = {x: v if v is None or v > 0 else floor for x, v in zip(bottom.x, bottom.low, strict=True)}
    highs = dict(zip(top.x, top.high, strict=True))
    keep = [i for i, x in enumerate(mean.x) if low == "min" or x in lows]
    xs = [mean.x[i] for i in keep]
    return Line(xs, [mean.mid[i] for i in keep], [lows.get(x) for x in xs], [highs.get(x) for x in xs], mean.dropped)
