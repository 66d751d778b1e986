"""A linear head and the memory that one tile of its logits may take.

Shapes: N tokens, n tokens of a tile, D hidden size, V vocabulary.

    y = logit_scale (h W^T + bias)        raw logits, (N, V)
    z = softcap tanh(y / softcap) / temperature, or y / temperature without a softcap
    logp = z[target] - logsumexp(z),  H = logsumexp(z) - sum_v p_v z_v,  p = softmax(z)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from driftscope.errors import UsageError

COLUMN_ALIGNMENT = 64  # a tile's rows start at multiples of this many elements, so that loads are wide for any V
ROW_ALIGNMENT = 128  # rows of a tile are multiples of this
GEMM_BLOCK = (256, 128)  # of one multiprocessor at a time, as cuBLAS does it on Hopper
WAVE_TOLERANCE = 0.97
FROZEN_WORKSPACE_BYTES = 640 << 20


@dataclass(frozen=True, kw_only=True)
class HeadTransform:
    """What happens to the raw logits before the softmax. Raises ``UsageError`` for values that divide by zero."""

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"temperature={self.temperature!r} must be positive: the logits are divided by it.")
        if self.softcap is not None and not self.softcap > 0:
            raise UsageError(f"softcap={self.softcap!r} must be positive, or None for no softcap.")

    def logits(self, raw: Tensor) -> Tensor:
        """z of raw ``h W^T + bias``, any shape; differentiable."""
        y = raw * self.logit_scale if self.logit_scale != 1.0 else raw
        if self.softcap is not None:
            y = self.softcap * torch.tanh(y / self.softcap)
        return y / self.temperature if self.temperature != 1.0 else y

    def slope(self, raw: Tensor) -> Tensor | float:
        """dz/draw at raw ``h W^T + bias``: a number, or a tensor of raw's shape with a softcap."""
        constant = self.logit_scale / self.temperature
        if self.softcap is None:
            return constant
        return (1.0 - torch.tanh(raw * (self.logit_scale / self.softcap)) ** 2) * constant


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the head's products: autocast's where it is on, else the wider of the two inputs'."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row statistics and gradient sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def padded(columns: int) -> int:
    """Row stride of a tile with this many columns, in elements."""
    return math.ceil(columns / COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT


def default_workspace_bytes(weight: Tensor, *, trainable: bool) -> int:
    """Bytes of a logits tile where the caller sets none.

    With a trainable head the tile may be as large as the weight's gradient in 16 bits: the tile is released before
    that gradient is made, so it does not raise the peak, and a taller tile means fewer read-modify-write passes over
    the fp32 sum of the weight's gradient.
    """
    gradient_bytes = 2 * weight.numel() if trainable else 0
    return max(FROZEN_WORKSPACE_BYTES, gradient_bytes)


def tile_rows(
    rows: int, columns: int, itemsize: int, workspace_bytes: int, *, hidden_size: int = 0, processors: int = 0
) -> int:
    """Rows of one tile within the budget, at least 1; the last tile takes what is left.

    With the number of multiprocessors given: of the sizes over half the budget the largest of those that leave the
    fewest of them idle in the product for the hidden gradient, (rows, D) in blocks of 256 by 128.
    Raises ``UsageError`` for a budget that holds not even one row.
    """
    row_bytes = padded(columns) * itemsize
    most = workspace_bytes // row_bytes
    if most < 1:
        raise UsageError(
            f"workspace_bytes={workspace_bytes} does not hold one row of logits, {row_bytes} bytes for a vocabulary "
            f"of {columns}; give at least that, a few hundred rows for speed."
        )
    if rows <= most:
        return max(rows, 1)
    if most < ROW_ALIGNMENT:
        return most
    most -= most % ROW_ALIGNMENT
    if not processors or not hidden_size:
        return most

    def busy(size: int) -> float:
        blocks = math.ceil(size / GEMM_BLOCK[0]) * math.ceil(hidden_size / GEMM_BLOCK[1])
        return size / (math.ceil(blocks / processors) * processors)

    sizes = range(most, most // 2, -ROW_ALIGNMENT)
    best = max(busy(size) for size in sizes)
    return next(size for size in sizes if busy(size) >= WAVE_TOLERANCE * best)


def check_inputs(hidden_ND: Tensor, weight: Tensor, targets_N: Tensor, bias: Tensor | None) -> None:
    """Refuse shapes that do not belong together, naming them."""
    if hidden_ND.dim() != 2 or weight.dim() != 2 or hidden_ND.shape[1] != weight.shape[1]:
        raise UsageError(
            f"hidden has shape {tuple(hidden_ND.shape)} and weight {tuple(weight.shape)}; expected (N, D) and (V, D)."
        )
    if tuple(targets_N.shape) != (hidden_ND.shape[0],):
        raise UsageError(f"targets has shape {tuple(targets_N.shape)}; expected ({hidden_ND.shape[0]},), one a row.")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise UsageError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), one a vocabulary entry.")
