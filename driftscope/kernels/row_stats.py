"""What is kept of every row of the logits.

Shapes: n rows. All vectors are float32 (float64 for float64 tiles).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_A_LINE = 32  # float32 numbers in the 128 bytes of a cache line


@dataclass(frozen=True)
class RowStats:
    """Softmax statistics of every row. logsumexp(z) = peaks + logsums, kept apart to stay exact for large logits."""

    logps: Tensor  # (n,)
    entropies: Tensor  # (n,), nats
    peaks: Tensor  # (n,) max_v z_v
    logsums: Tensor  # (n,) log sum_v exp(z_v - peak)

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> RowStats:
        """Room for the statistics of that many rows.

        Each vector starts at a whole cache line: Triton compiles a kernel anew for a pointer that is not aligned.
        """
        room = torch.empty(4, math.ceil(rows / ROWS_A_LINE) * ROWS_A_LINE, dtype=dtype, device=device)
        return cls(*room[:, :rows].unbind(0))

    def part(self, index: slice) -> RowStats:
        """The same memory, some rows."""
        return RowStats(self.logps[index], self.entropies[index], self.peaks[index], self.logsums[index])
