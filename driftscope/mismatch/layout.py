"""Where each number of a packed ``MismatchSums`` stands. Plain Python: read by the device side and the host side.

The vector is [sums | extrema]: sums add up over batches and ranks, extrema take the maximum (minima are stored
negated). d = trainer log-prob - engine log-prob, w = exp(d).
"""

from __future__ import annotations

LOG_LIMIT = 300.0
"""Log ratios are clamped to +-LOG_LIMIT before ``exp``; w^2 of one token is then 1e260, and sums stay finite."""
VALUE_LIMIT = 1e30
"""Log-probs and their differences are cut off there, so that no square or sum overflows."""
BAND = (0.9, 1.1)
"""Ratios outside it are counted."""

# Six distributions of a log weight: what the engine and the trainer say, and what the loss multiplies by.
LEVELS = ("token", "geometric", "product")
DISTRIBUTIONS = tuple(f"{which}.{level}" for level in LEVELS for which in ("raw", "applied"))
MOMENTS = (
    "count",
    "excess",  # w - 1
    "excess_square",
    "log",  # of the weights over zero
    "log_abs",
    "log_square",
    "clamped",  # |log w| over LOG_LIMIT
    "zero",  # w = 0: masked out by the loss
    "over_cap",
    "under_floor",
    "outside",  # of BAND
)
BOUNDS = ("log_max", "log_min")

TOKEN = (
    "tokens",  # with a finite d
    "unscored",  # masked-in tokens whose engine log-prob is NaN
    "nonfinite",  # the other masked-in tokens without a finite d
    "k3",
    "k3_reverse",
    "k1_reverse",
    "js",
    "mult_excess",  # exp|d| - 1
    "p_trainer",
    "p_engine",
    "p_trainer_square",
    "p_engine_square",
    "p_product",
    "p_abs_diff",
    "p_square_diff",
)
TOKEN_BOUNDS = ("abs_log_max", "p_abs_diff_max")

SEQUENCE = (
    "sequences",  # with at least one finite d
    "incomplete",  # of them, those in which a token was left out
    "length",
    "log_ppl_trainer",
    "log_ppl_engine",
    "log_ppl_abs_diff",
    "ppl_trainer",
    "ppl_engine",
    "ppl_ratio",
)

# The histogram of a log weight x: its edges are symmetric, zero has a bin of its own.
PER_DECADE = 24
TINY, LINEAR_TO, HUGE = 1e-8, 20.0, 2e4
_SMALL: list[float] = [TINY * 10.0 ** (i / PER_DECADE) for i in range(8 * PER_DECADE)]  # 1e-8 .. 1
_MIDDLE = [1.0 + 0.1 * i for i in range(190)]  # 1 .. 20
_LARGE: list[float] = [LINEAR_TO * 10.0 ** (i / PER_DECADE) for i in range(3 * PER_DECADE + 1)]  # 20 .. 2e4
_POSITIVE = [*_SMALL, *_MIDDLE, *_LARGE]
EDGES: tuple[float, ...] = tuple([-edge for edge in reversed(_POSITIVE)] + _POSITIVE)
BINS = len(EDGES) + 1
QUANTILE_ERROR = 0.05
"""A quantile q of x read from the histogram is off by at most QUANTILE_ERROR * |x|, and by no more than
QUANTILE_ERROR where 1 <= |x| <= 20; |x| < 1e-8 reads as 0. So the ratio exp(x) is within 5.2% and near 1 within 5%
of its distance from 1."""

# Bins of the engine's probability and of the position; each bin holds BINNED.
PROBABILITY_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9)
DECILES = 10
OCTAVES = 20  # of the 1-based position: 1, 2-3, 4-7, ... ; the last one is open
BINNED = ("count", "log", "log_abs", "log_square")
GROUPS = {"probability": len(PROBABILITY_EDGES) + 1, "decile": DECILES, "octave": OCTAVES}


def _offsets() -> tuple[dict[str, slice], int, int]:
    where: dict[str, slice] = {}
    at = 0

    def add(name: str, size: int) -> None:
        nonlocal at
        where[name] = slice(at, at + size)
        at += size

    for name in DISTRIBUTIONS:
        add(f"{name}.moments", len(MOMENTS))
    for name in DISTRIBUTIONS:
        add(f"{name}.histogram", BINS)
    add("token", len(TOKEN))
    add("sequence", len(SEQUENCE))
    for name, size in GROUPS.items():
        add(name, size * len(BINNED))
    sums = at
    for name in DISTRIBUTIONS:
        add(f"{name}.bounds", len(BOUNDS))
    add("token.bounds", len(TOKEN_BOUNDS))
    return where, sums, at


WHERE, SUMS, SIZE = _offsets()
"""Section name -> slice of the packed vector; how many of it are sums; its length."""


def representative(index: int) -> float:
    """The value that stands for a histogram bin: its middle; the outermost edge for the two open bins."""
    if index == 0:
        return EDGES[0]
    if index == BINS - 1:
        return EDGES[-1]
    return (EDGES[index - 1] + EDGES[index]) / 2
