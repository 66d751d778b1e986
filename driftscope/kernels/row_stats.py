"""What is kept of every row of the logits.

Shapes: n rows. All vectors are float32 (float64 for float64 tiles).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowStats:
    """Softmax statistics of every row. logsumexp(z) = peaks + logsums, kept apart to stay exact for large logits."""

    logps: Tensor  # (n,)
    entropies: Tensor  # (n,), nats
    peaks: Tensor  # (n,) max_v z_v
    logsums: Tensor  # (n,) log sum_v exp(z_v - peak)

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> RowStats:
        """Room for the statistics of that many rows."""
        return cls(*torch.empty(4, rows, dtype=dtype, device=device).unbind(0))

    def part(self, index: slice) -> RowStats:
        """The same memory, some rows."""
        return RowStats(self.logps[index], self.entropies[index], self.peaks[index], self.logsums[index])
