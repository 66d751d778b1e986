"""From packed sums to figures: one copy to the host, then plain arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from driftscope.mismatch import layout
from driftscope.mismatch.layout import BINNED, EDGES, LOG_LIMIT, MOMENTS, SEQUENCE, TOKEN, WHERE
from driftscope.mismatch.model import (
    Bin,
    Divergences,
    HistogramBin,
    Levels,
    LogDifference,
    Mismatch,
    Perplexity,
    Probability,
    WeightFigures,
)

if TYPE_CHECKING:
    from driftscope.mismatch.sums import MismatchSums

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHOWN = 4  # fine bins in one bin of the histogram that is kept

Row = list[float]


def figures(sums: MismatchSums) -> Mismatch:
    """Every figure of a mismatch. The one synchronisation: a copy of layout.SIZE float64 to the host."""
    packed: Row = sums.packed.tolist()
    token = dict(zip(TOKEN, packed[WHERE["token"]], strict=True))
    sequence = dict(zip(SEQUENCE, packed[WHERE["sequence"]], strict=True))
    size_max, gap_max = packed[WHERE["token.bounds"]]
    bounded = (sums.cap is not None, sums.floor is not None)
    raw = _levels(packed, "raw", bounded)
    n, m = token["tokens"], sequence["sequences"]
    moments = _moments(packed, "raw.token")
    out = Mismatch(
        tokens=int(n),
        sequences=int(m),
        unscored=int(token["unscored"]),
        nonfinite=int(token["nonfinite"]),
        incomplete=int(sequence["incomplete"]),
        cap=sums.cap,
        floor=sums.floor,
        applied_level=sums.applied_level,
        raw=raw,
        applied=_levels(packed, "applied", bounded) if sums.applied_level else None,
        by_probability=_bins(packed, "probability", _probability_edges()),
        by_decile=_bins(packed, "decile", _decile_edges()),
        by_octave=_bins(packed, "octave", _octave_edges()),
        histogram=_shown(packed[WHERE["raw.token.histogram"]]),
    )
    if not n:
        return out
    out.mean_length = sequence["length"] / m
    out.share_outside = raw.token.share_outside
    histogram = packed[WHERE["raw.token.histogram"]]
    low, high = _bounds(packed, "raw.token")
    out.log_difference = LogDifference(
        mean=moments["log"] / n,
        abs_mean=moments["log_abs"] / n,
        std=raw.token.log_std,
        abs_max=size_max,
        mult_prob_error=1 + token["mult_excess"] / n,
        quantiles=_quantiles(histogram, low, high),
        abs_quantiles=_quantiles(_folded(histogram), 0.0, size_max),
    )
    out.divergence = Divergences(
        k1=-moments["log"] / n,
        k3=token["k3"] / n,
        k1_reverse=token["k1_reverse"] / n,
        k3_reverse=token["k3_reverse"] / n,
        js=token["js"] / n,
        chi2_token=raw.token.chi2,
        chi2_sequence=raw.product.chi2,
    )
    out.perplexity = _perplexity(sequence, packed)
    out.probability = _probability(token, gap_max)
    return out


def _moments(packed: Row, name: str) -> dict[str, float]:
    rows = packed[WHERE["raw.token.moments"].start :]
    at = layout.DISTRIBUTIONS.index(name) * len(MOMENTS)
    return dict(zip(MOMENTS, rows[at : at + len(MOMENTS)], strict=True))


def _bounds(packed: Row, name: str) -> tuple[float, float]:
    top, low = packed[WHERE[f"{name}.bounds"]]
    return -low, top


def _levels(packed: Row, which: str, bounded: tuple[bool, bool]) -> Levels:
    return Levels(**{level: _weights(packed, f"{which}.{level}", bounded) for level in layout.LEVELS})


def _weights(packed: Row, name: str, bounded: tuple[bool, bool]) -> WeightFigures:
    s = _moments(packed, name)
    n = s["count"]
    if not n:
        return WeightFigures()
    excess, square = s["excess"] / n, s["excess_square"] / n
    second = 1 + 2 * excess + square  # E[w^2]
    low, high = _bounds(packed, name)
    logs = n - s["zero"]
    log_mean = s["log"] / logs if logs else None
    quantiles = _quantiles(packed[WHERE[f"{name}.histogram"]], low, high)
    return WeightFigures(
        count=int(n),
        mean=1 + excess,
        std=math.sqrt(max(square - excess * excess, 0.0)),
        min=_exp(low),
        max=_exp(high),
        ess=(1 + excess) ** 2 / second if second > 0 else 0.0,
        chi2=2 * excess + square,
        log_mean=log_mean,
        log_std=math.sqrt(max(s["log_square"] / logs - log_mean**2, 0.0)) if log_mean is not None else None,
        share_outside=s["outside"] / n,
        share_over_cap=s["over_cap"] / n if bounded[0] else None,
        share_under_floor=s["under_floor"] / n if bounded[1] else None,
        share_zero=s["zero"] / n,
        clamped=int(s["clamped"]),
        quantiles={q: _exp(value) for q, value in quantiles.items()},
    )


def _exp(log: float) -> float:
    return math.exp(min(log, LOG_LIMIT))


def _quantiles(histogram: Row, low: float, high: float) -> dict[str, float]:
    """The smallest value with at least a share q at or under it, to layout.QUANTILE_ERROR, held within the extrema."""
    total = sum(histogram)
    if not total:
        return {}
    running = list(itertools.accumulate(histogram))
    out = {}
    for q in QUANTILES:
        need = max(math.ceil(q * total - 1e-9), 1)
        index = next(i for i, count in enumerate(running) if count >= need)
        value = layout.representative(index)
        if index in (0, layout.BINS - 1):
            value = low if index == 0 else high
        out[f"p{round(q * 100):02d}"] = min(max(value, low), high)
    return out


def _folded(histogram: Row) -> Row:
    """The histogram of |x|: each bin takes what stands at its mirror image."""
    middle = layout.BINS // 2
    return [
        0.0 if i < middle else count + (histogram[layout.BINS - 1 - i] if i > middle else 0.0)
        for i, count in enumerate(histogram)
    ]


def _perplexity(s: dict[str, float], packed: Row) -> Perplexity:
    m = s["sequences"]
    low, high = _bounds(packed, "raw.geometric")  # log of the geometric mean = -log_ppl_diff
    return Perplexity(
        trainer=s["ppl_trainer"] / m,
        engine=s["ppl_engine"] / m,
        ratio=s["ppl_ratio"] / m,
        log_trainer=s["log_ppl_trainer"] / m,
        log_engine=s["log_ppl_engine"] / m,
        log_diff=-_moments(packed, "raw.geometric")["log"] / m,
        log_abs_diff=s["log_ppl_abs_diff"] / m,
        log_diff_max=-low,
        log_diff_min=-high,
    )


def _probability(t: dict[str, float], gap_max: float) -> Probability:
    n = t["tokens"]
    p, q = t["p_trainer"] / n, t["p_engine"] / n
    var_p, var_q = t["p_trainer_square"] / n - p * p, t["p_engine_square"] / n - q * q
    gap = t["p_abs_diff"] / n
    spread = var_p * var_q
    # Variances at rounding level: constant probabilities, no correlation to speak of.
    known = n > 1 and min(var_p, var_q) > 1e-14
    return Probability(
        correlation=min(max((t["p_product"] / n - p * q) / math.sqrt(spread), -1.0), 1.0) if known else None,
        abs_diff_mean=gap,
        abs_diff_max=gap_max,
        abs_diff_std=math.sqrt(max(t["p_square_diff"] / n - gap * gap, 0.0)),
    )


def _bins(packed: Row, group: str, edges: list[float | None]) -> list[Bin]:
    rows, width, out = packed[WHERE[group]], len(BINNED), []
    for i in range(len(edges) - 1):
        count, total, size, square = rows[i * width : (i + 1) * width]
        low = edges[i]
        row = Bin(low=0.0 if low is None else low, high=edges[i + 1], count=int(count))
        if count:
            row.mean, row.abs_mean = total / count, size / count
            row.std = math.sqrt(max(square / count - row.mean**2, 0.0))
        out.append(row)
    return out


def _probability_edges() -> list[float | None]:
    return [0.0, *layout.PROBABILITY_EDGES, 1.0]


def _decile_edges() -> list[float | None]:
    return [i / layout.DECILES for i in range(layout.DECILES + 1)]


def _octave_edges() -> list[float | None]:
    return [*(2.0**i for i in range(layout.OCTAVES)), None]


def _shown(histogram: Row) -> list[HistogramBin]:
    """Groups of _SHOWN fine bins, mirrored about zero's own; empty ones left out."""
    middle = layout.BINS // 2
    starts = [middle + 1 + i for i in range(0, middle, _SHOWN)]
    groups = [(start, min(start + _SHOWN, layout.BINS)) for start in starts]
    mirrored = [(layout.BINS - stop, layout.BINS - start) for start, stop in reversed(groups)]
    out = []
    for start, stop in [*mirrored, (middle, middle + 1), *groups]:
        if count := sum(histogram[start:stop]):
            low = EDGES[start - 1] if start > 0 else None
            high = EDGES[stop - 1] if stop < layout.BINS else None
            out.append(HistogramBin(low=low, high=high, count=int(count)))
    return out
