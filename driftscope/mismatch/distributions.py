"""Sums, extrema and histograms of the six distributions of a log weight: raw and applied, by token, by sequence.

A weight x is given by its log: 0 where there is none, -inf where the loss multiplies by 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftscope.mismatch import layout
from driftscope.mismatch.binned import constant
from driftscope.mismatch.layout import BAND, BINS, BOUNDS, LOG_LIMIT, MOMENTS

_SLACK = 1e-6  # a ratio truncated to the cap in the trainer's dtype is at it, not under it


def distributions(
    d: Tensor,
    used: Tensor,
    lengths: Tensor,
    applied: Tensor | None,
    level: str | None,
    log_cap: float,
    log_floor: float,
) -> tuple[Tensor, Tensor]:
    """All moments, then all histograms; and all bounds: flat, in the order of layout.DISTRIBUTIONS.

    d: (B, T) log ratio, 0 where not used. lengths: (B,) used tokens. applied: (B, T), (B, 1) or ``None``. log_cap,
    log_floor: NaN for none.
    """
    n = lengths.clamp(min=1)
    product, has = d.sum(-1), lengths > 0
    tokens, sequences = [(d, used)], [(product / n, has), (product, has)]
    if applied is not None:
        log_BT, keep_BT, log_B, keep_B, n_applied = _applied(applied, used, lengths, level)
        tokens.append((log_BT, keep_BT))
        sequences = [sequences[0], (log_B / n_applied, keep_B), sequences[1], (log_B, keep_B)]

    moments, histograms, bounds = [], [], []
    for group in (tokens, sequences):
        logs, uses = torch.stack([log for log, _ in group]), torch.stack([use for _, use in group])
        moments.append(_moments(logs.flatten(1), uses.flatten(1), log_cap, log_floor))
        histograms.append(_histogram(logs, uses))
        bounds.append(_bounds(logs.flatten(1), uses.flatten(1)))
    parts = [torch.cat(part) for part in (moments, histograms, bounds)]
    if applied is None:  # room for the applied ratio's, so that the layout is one
        fill = (0.0, 0.0, -math.inf)
        parts = [torch.stack([p, torch.full_like(p, value)], 1) for p, value in zip(parts, fill, strict=True)]
    return torch.cat([parts[0].flatten(), parts[1].flatten()]), parts[2].flatten()


def _applied(
    applied: Tensor, used: Tensor, lengths: Tensor, level: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log weight of each token and which have one; of each sequence; and the tokens that a sequence's stands for."""
    weight = applied.detach().to(used.device, torch.float64)
    good = torch.isfinite(weight) & (weight >= 0)
    log = torch.where(good, weight, 1.0).log()
    keep_BT = used & good
    log_BT = torch.where(keep_BT, log, 0.0)
    if level == "token":
        n = keep_BT.sum(-1)
        return log_BT, keep_BT, log_BT.sum(-1), n > 0, n.clamp(min=1)
    # One weight a sequence; given as (B, T), it stands at every used token.
    log_B = torch.where(log_BT.amax(-1) > 0, log_BT.amax(-1), log_BT.amin(-1)) if log_BT.shape[-1] else lengths * 0.0
    return log_BT, keep_BT, log_B, keep_BT.any(-1), lengths.clamp(min=1)


def _moments(logs_KN: Tensor, uses_KN: Tensor, log_cap: float, log_floor: float) -> Tensor:
    """(K, len(MOMENTS)), in that order."""
    none = torch.isinf(logs_KN)
    finite = logs_KN.masked_fill(none, 0.0)
    excess = torch.expm1(logs_KN.clamp(-LOG_LIMIT, LOG_LIMIT))
    size = finite.abs()
    rows = [
        uses_KN,
        excess,
        excess * excess,
        finite,
        size,
        finite * finite,
        size > LOG_LIMIT,
        none,
        uses_KN & (logs_KN >= log_cap - _SLACK),  # never, for NaN
        uses_KN & ~none & (logs_KN <= log_floor + _SLACK),
        (excess < BAND[0] - 1) | (excess > BAND[1] - 1),
    ]
    assert len(rows) == len(MOMENTS)
    return torch.stack([row.double() for row in rows], 1).sum(-1)


def _bounds(logs_KN: Tensor, uses_KN: Tensor) -> Tensor:
    """(K, 2): the largest log weight and the negated smallest; -inf where there is none."""
    if logs_KN.shape[-1] == 0:
        return logs_KN.new_full((logs_KN.shape[0], len(BOUNDS)), -math.inf)
    both = torch.stack([logs_KN, -logs_KN], 1)
    return torch.where(uses_KN.unsqueeze(1), both, -math.inf).amax(-1)


def _histogram(logs: Tensor, uses: Tensor) -> Tensor:
    """(K, BINS) counts of (K, ..., M); one partial histogram a row, so that a GPU's atomics seldom meet."""
    index = torch.bucketize(logs, constant(layout.EDGES, logs.device))
    counts = torch.zeros(*logs.shape[:-1], BINS, dtype=torch.float64, device=logs.device)
    counts.scatter_add_(-1, index, uses.double())
    return counts.sum(1) if counts.dim() == 3 else counts
