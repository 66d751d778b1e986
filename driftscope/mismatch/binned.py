"""Sums by the engine's token probability and by the position in the completion."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from driftscope.mismatch.layout import BINNED, DECILES, GROUPS, OCTAVES, PROBABILITY_EDGES

_LOG_EDGES = tuple(math.log(edge) for edge in PROBABILITY_EDGES)
_OCTAVE_EDGES = tuple(2.0**i for i in range(1, OCTAVES))


@lru_cache(maxsize=32)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A float64 table on the device, copied there once."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float64, device=device)


def binned_sums(d: Tensor, engine: Tensor, used: Tensor, inside: Tensor) -> Tensor:
    """Flat sums of layout.GROUPS, each (bins, len(BINNED)): count, sum of d, |d| and d^2.

    d, engine: (B, T), 0 where not used. The position is the column, 1-based; the decile that of column / length, where
    the length is the last column of the mask.
    """
    B, T = d.shape
    column = torch.arange(1, T + 1, device=d.device, dtype=torch.float64)
    lengths = (column * inside).amax(-1, keepdim=True) if T else column.new_zeros(B, 1)
    probability = torch.bucketize(engine, constant(_LOG_EDGES, d.device), right=True)
    decile = ((column - 1) * DECILES / lengths.clamp(min=1)).long().clamp(max=DECILES - 1)
    octave = torch.bucketize(column, constant(_OCTAVE_EDGES, d.device), right=True)
    values = torch.stack([used.double(), d, d.abs(), d * d])
    out = []
    for index, size in zip((probability, decile, octave), GROUPS.values(), strict=True):
        totals = torch.zeros(len(BINNED), B, size, dtype=torch.float64, device=d.device)
        totals.scatter_add_(-1, index.expand(len(BINNED), B, T), values)
        out.append(totals.sum(1).T.flatten())
    return torch.cat(out)
