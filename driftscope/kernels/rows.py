"""Row operations on a tile of raw logits: what goes in, what comes out, and which implementation runs.

Shapes: n rows of the tile, V columns. All per-row vectors are float32 (float64 for float64 tiles).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from driftscope.kernels.head import HeadTransform
    from driftscope.kernels.row_stats import RowStats
    from driftscope.kernels.token_terms import TokenTerms


class RowOps(Protocol):
    """One implementation: ``rows_torch`` or ``rows_triton``."""

    def stats(
        self, tile: Tensor, bias: Tensor | None, targets: Tensor, transform: HeadTransform, out: RowStats
    ) -> None:
        """Fill ``out`` from a tile of raw logits."""

    def gradient_(
        self,
        tile: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        stats: RowStats,
        grad_logps: Tensor,
        grad_entropies: Tensor | None,
    ) -> None:
        """Overwrite raw logits by dL/draw = (c (1[v = target] - p_v) - e p_v (log p_v + H)) dz/draw."""

    def stats_gradient_(
        self, tile: Tensor, bias: Tensor | None, targets: Tensor, transform: HeadTransform, out: RowStats
    ) -> None:
        """Fill ``out``, and overwrite raw logits by dlogp/draw = (1[v = target] - p_v) dz/draw."""

    def loss_(
        self,
        tile: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        terms: TokenTerms,
        out: RowStats,
        losses: Tensor,
        grad_logps: Tensor,
        scale: float,
    ) -> None:
        """Statistics, token losses (n,), token coefficients (n,), and the tile's gradient times ``scale`` in place."""


def row_ops(device: torch.device, dtype: torch.dtype) -> RowOps:
    """Triton where it can run, plain PyTorch elsewhere and for float64.

    With TRITON_INTERPRET=1 in the environment Triton's interpreter runs the kernels on the CPU.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if dtype != torch.float64 and (device.type == "cuda" or interpreted) and triton_available():
        from driftscope.kernels import rows_triton

        return cast("RowOps", rows_triton)
    from driftscope.kernels import rows_torch

    return cast("RowOps", rows_torch)


def triton_available() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
