"""The ranks beside each other: who contributed what, who is slow, who disagrees with the rest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from driftscope.ranks.share import Share
from driftscope.records import RankRow, RanksRecord, StepRecord

MOST_ROWS = 64
SPAN = 20
"""Steps over which a rank's own time is judged: completions differ in length from step to step."""
KNOWN_AFTER = 5
APART = 6.0
"""Standard errors by which a rank's mean ratio must be off the others'."""
NOTICED = 0.05
"""Relative difference below which a rank's figure never counts as apart."""
WORSE = 10.0
"""Multiple of the other ranks' median from which a rank's error counts as its own."""


class RankWatch:
    """Keeps the ranks' own times over the last steps, and makes the record of a step's ranks."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._own_ms: list[deque[float]] = [deque(maxlen=SPAN) for _ in range(processes)]

    def times(self, own_ms: Sequence[float]) -> None:
        """Take in each rank's own time of one step, ms; NaN where it is unknown."""
        for kept, value in zip(self._own_ms, own_ms, strict=True):
            if math.isfinite(value):
                kept.append(value)

    def record(self, merged: StepRecord, shares: Sequence[Share], failed: Sequence[int]) -> RanksRecord:
        """The record of one micro-batch. failed: stages that are off, a number a rank."""
        out = RanksRecord(processes=self.processes, missing=[s.rank for s in shares if not s.present])
        self._slowest(out)
        rows = [_row(share, merged.live, off) for share, off in zip(shares, failed, strict=True)]
        if merged.tier != "light":
            out.disagree = disagreements(merged, [s for s in shares if s.present])
            apart = {rank for ranks in out.disagree.values() for rank in ranks} | {out.slowest}
            rows.sort(key=lambda row: (row.rank not in apart, row.rank))
            out.rows = sorted(rows[:MOST_ROWS], key=lambda row: row.rank)
        return out

    def _slowest(self, out: RanksRecord) -> None:
        usual = {rank: median(kept) for rank, kept in enumerate(self._own_ms) if len(kept) >= KNOWN_AFTER}
        if len(usual) < 2:
            return
        slowest = max(usual, key=lambda rank: usual[rank])
        out.slowest, out.slowest_ms = slowest, usual.pop(slowest)
        out.median_ms = median(usual.values())


def disagreements(merged: StepRecord, shares: Sequence[Share]) -> dict[str, list[int]]:
    """What should be the same on all ranks, and the ranks on which it is not.

    ``coef_error``, ``residual``: the live path is off there by ten times the others' median. ``is_ratio``: its
    mean differs from the others' by six standard errors. ``causes``: other terms are dropped there. ``normalizer``:
    the live path divides by another number although the configured loss divides by the same on every rank.
    """
    if len(shares) < 2:
        return {}
    live = merged.live
    found = {
        "coef_error": _worse(shares, lambda s: s.path(live, "coef_error"), 1e-3),
        "residual": _worse(shares, lambda s: s.get("residual"), 1e-3),
        "is_ratio": _ratios_apart(shares),
        "causes": _causes_apart(shares),
        "normalizer": _divisors_apart(shares, live),
    }
    return {name: ranks for name, ranks in found.items() if ranks}


def _worse(shares: Sequence[Share], get: Callable[[Share], float | None], least: float) -> list[int]:
    known = [(share.rank, value) for share in shares if (value := get(share)) is not None]
    out = []
    for rank, value in known:
        others = [v for r, v in known if r != rank]
        if others and value > least and value > WORSE * median(others):
            out.append(rank)
    return out


def _ratios_apart(shares: Sequence[Share]) -> list[int]:
    """Ranks whose mean token ratio is apart from that of all others together, in either's standard errors."""
    known = [(s.rank, r) for s in shares if (r := s.ratio("raw_token")) is not None and r["count"] > 1]
    if len(known) < 2:
        return []
    out = []
    for rank, own in known:
        others = [r for q, r in known if q != rank]
        count = sum(r["count"] for r in others)
        if not count:
            continue
        mean = sum(r["count"] * r["mean"] for r in others) / count
        variance = sum(r["count"] * (r["std"] ** 2 + (r["mean"] - mean) ** 2) for r in others) / count
        error = math.sqrt(own["std"] ** 2 / own["count"] + variance / count)
        apart = abs(own["mean"] - mean)
        if apart > APART * error and apart > NOTICED * abs(mean):
            out.append(rank)
    return out if len(out) < len(known) else _furthest(known)


def _furthest(known: Sequence[tuple[int, dict[str, float]]]) -> list[int]:
    """Of ranks that are all apart from the rest (of two, both are), those off the median the most."""
    middle = median(r["mean"] for _, r in known)
    if len(known) == 2:
        return [rank for rank, _ in known]
    size = max(abs(r["mean"] - middle) for _, r in known)
    return [rank for rank, r in known if abs(r["mean"] - middle) == size]


def _causes_apart(shares: Sequence[Share]) -> list[int]:
    """Ranks that found other causes than most, where theirs make a difference there."""
    masks = {s.rank: int(m) for s in shares if (m := s.get("causes")) is not None}
    if len(set(masks.values())) < 2:
        return []
    usual = max(set(masks.values()), key=lambda mask: (list(masks.values()).count(mask), mask))
    return [rank for rank, mask in masks.items() if mask & ~usual]


def _divisors_apart(shares: Sequence[Share], live: str) -> list[int]:
    """Ranks whose measured divisor is apart from the median although the intended one is the same everywhere."""
    intended = [v for s in shares if (v := s.path("oracle", "normalizer")) is not None]
    known = [(s.rank, v) for s in shares if (v := s.path(live, "normalizer_measured")) is not None]
    if len(intended) < len(shares) or len(known) < 2 or not _same(intended):
        return []
    middle = median(v for _, v in known)
    return [] if _same([v for _, v in known]) else [r for r, v in known if abs(v / middle - 1) > NOTICED / 2]


def _same(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= NOTICED * abs(max(values, key=abs))


def _row(share: Share, live: str, failed: int) -> RankRow:
    ratio, tokens = share.ratio("raw_token"), share.get("tokens")
    return RankRow(
        rank=share.rank,
        tokens=None if tokens is None else int(tokens),
        normalizer=share.path(live, "normalizer"),
        normalizer_measured=share.path(live, "normalizer_measured"),
        loss=share.path(live, "loss"),
        hidden_grad_norm=share.path(live, "hidden_grad_norm"),
        coef_error=share.path(live, "coef_error"),
        is_ratio_mean=ratio["mean"] if ratio is not None else None,
        residual=share.get("residual"),
        step_ms=share.get("step_ms"),
        overhead_ms=share.get("overhead_ms"),
        failed=failed,
    )
