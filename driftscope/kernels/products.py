"""Products of rows, summed in float64: what the spectrometer's small differences of large numbers are made of.

A GPU reads both arrays once and multiplies in registers; elsewhere plain PyTorch makes float64 copies.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from driftscope.kernels.rows import triton_available


def row_products(a_ND: Tensor, b_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """<a, a>, <a, b> and <b, b> of every row, (N,) float64 each; a, b (N, D) of any float dtype.

    Products of float32 numbers are exact in float64, so only the sums round.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (a_ND.is_cuda or interpreted) and triton_available():
        from driftscope.kernels.triton_products import row_products as in_one_pass

        return in_one_pass(_plain(a_ND), _plain(b_ND))
    a, b = a_ND.double(), b_ND.double()
    return (a * a).sum(-1), (a * b).sum(-1), (b * b).sum(-1)


def _plain(rows: Tensor) -> Tensor:
    """Contiguous and at least float32."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
