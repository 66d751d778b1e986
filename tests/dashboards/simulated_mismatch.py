"""The sampling drift of the simulated run: top_p = 0.8 from the start, weights that stop being synced at step 21."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from driftscope.mismatch.layout import DECILES, EDGES, OCTAVES, PROBABILITY_EDGES
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
from driftscope.records import CanaryRecord, Cause, DriftRecord

FLOOR, STALE_FROM, LENGTH = 1.2e-6, 21, 24


def staleness(step: int) -> float:
    """What the old weights of the engine differ by, nats a token."""
    return 0.01 * (step - STALE_FROM + 1) if step >= STALE_FROM else 0.0


def draws(step: int, micro: int, n: int = 96) -> list[float]:
    """The log ratio of the tokens of a micro-batch."""
    rng = random.Random(f"mismatch/{step}/{micro}")
    return [math.log(0.81) + rng.gauss(0, FLOOR) + rng.gauss(0, 1) * staleness(step) for _ in range(n)]


def mismatch(step: int, micro: int = 0) -> Mismatch:
    d = draws(step, micro)
    n, mean, size = len(d), sum(d) / len(d), sum(map(abs, d)) / len(d)
    weights = [math.exp(x) for x in d]
    w, square = sum(weights) / n, sum(x * x for x in weights) / n
    token = WeightFigures(
        count=n, mean=w, std=math.sqrt(max(square - w * w, 0.0)), min=min(weights), max=max(weights),
        ess=w * w / square, chi2=square - 1, share_outside=1.0, quantiles={"p05": min(weights), "p95": max(weights)},
    )  # fmt: skip
    product = WeightFigures(count=n // LENGTH, mean=math.exp(LENGTH * mean), min=0.004, max=0.009, ess=0.9)
    rng = random.Random(f"bins/{step}/{micro}")
    edges = [0.0, *PROBABILITY_EDGES, 1.0]
    return Mismatch(
        tokens=n, sequences=n // LENGTH, mean_length=float(LENGTH), cap=3.0, applied_level="sequence",
        raw=Levels(token=token, product=product), applied=Levels(product=product),
        log_difference=LogDifference(mean=mean, abs_mean=size, std=0.01, abs_max=max(map(abs, d))),
        divergence=Divergences(k1=-mean, k3=0.02, chi2_token=square - 1), share_outside=1.0,
        perplexity=Perplexity(trainer=90.0, engine=72.0, ratio=1.25), probability=Probability(correlation=0.99),
        by_probability=[_bin(lo, hi, rng.randint(5, 30) if lo >= 1e-3 else 0, mean, size)
                        for lo, hi in pairwise(edges)],
        by_decile=[_bin(i / DECILES, (i + 1) / DECILES, n // DECILES, mean, size) for i in range(DECILES)],
        by_octave=[_bin(2.0**i, 2.0 ** (i + 1) if i < OCTAVES - 1 else None, n // 5 if i < 5 else 0, mean, size)
                   for i in range(OCTAVES)],
        histogram=histogram(d),
    )  # fmt: skip


def _bin(low: float, high: float | None, count: int, mean: float, size: float) -> Bin:
    filled = {"mean": mean, "abs_mean": size, "std": 0.02} if count else {}
    return Bin(low=low, high=high, count=count, **filled)


def histogram(d: list[float]) -> list[HistogramBin]:
    """Counts between every fourth edge, as the records keep them."""
    half = len(EDGES) // 2
    positive = [*EDGES[half::4], *([EDGES[-1]] if (half - 1) % 4 else [])]
    edges = [*(-e for e in reversed(positive)), *positive]
    bins = [HistogramBin(low=a, high=b, count=sum(a < x <= b for x in d)) for a, b in pairwise(edges)]
    return [b for b in bins if b.count]


def canary(step: int) -> CanaryRecord:
    stale = staleness(step)
    rms = math.hypot(0.21, stale)
    return CanaryRecord(
        tokens=96, agrees_with="previous" if stale else "current", snapshot_step=min(step - 1, STALE_FROM - 1) or None,
        distances={"current": rms, "previous": 0.21 if stale else 0.213}, noise_floor=FLOOR * (1 + 0.1 * (step % 3)),
        own_shift=0.0, rms=rms, rest_rms=1.5e-6,
    )  # fmt: skip


def causes(step: int) -> list[Cause]:
    size, stale = 0.21**2, staleness(step) ** 2
    rows = [
        Cause(id="truncated_support", share=size / (size + stale) + 2e-6, factor=0.81, detail="top_p=0.8 keeps"),
        Cause(id="engine_noise", share=-2e-6, factor=1.0),
        Cause(id="sequence_product", share=0.0, factor=0.0078, detail="what multiplying the ratios makes of one"),
    ]  # fmt: skip
    if stale:
        detail = f"the engine agrees with the weights of step {STALE_FROM - 1}"
        rows.insert(1, Cause(id="stale_weights", share=stale / (size + stale), factor=1.01, detail=detail))
    return rows


def drift(step: int) -> dict[str, DriftRecord]:
    rng = random.Random(f"drift/{step}")
    alarm = step >= STALE_FROM + 4
    state = "warm-up" if step <= 12 else "alarm" if alarm else "quiet"
    moved = DriftRecord(
        value=math.log(0.02 + staleness(step)) + rng.gauss(0, 0.05), baseline=math.log(0.02) if step > 12 else None,
        floor=0.18, state=state, kind="trend" if alarm else None, started=STALE_FROM if alarm else None,
        score=9.0 if alarm else None,
    )  # fmt: skip
    calm = DriftRecord(
        value=math.log(0.81) + rng.gauss(0, 0.003), baseline=math.log(0.81) if step > 12 else None, floor=3.6e-6,
        state="warm-up" if step <= 12 else "quiet",
    )  # fmt: skip
    return {"log_is_mean": calm, "log_is_std": moved}
