"""Scaling of gradient sums on their way out, computed in float32 whatever they are stored in.

Float16 cannot hold the gradient of a mean over many tokens, so float16 tiles carry it times a power of two, which is
taken out again here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftscope.kernels.rows import triton_available


def unit_scale(dtype: torch.dtype, *coefficients: Tensor | None) -> float:
    """The power of two that brings the largest coefficient to about 1; 1.0 for dtypes with float32's range."""
    if dtype != torch.float16:
        return 1.0
    peaks = [float(c.abs().max()) for c in coefficients if c is not None and c.numel()]
    peak = max(peaks, default=0.0)
    if not math.isfinite(peak) or peak == 0.0:
        return 1.0
    return 2.0 ** -round(math.log2(peak))


def scaled(tensor: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``tensor * factor`` in ``dtype``, multiplied in at least float32; ``factor``: a scalar tensor, ``None`` is 1."""
    if tensor is None:
        return None
    if factor is None:
        return tensor.to(dtype)
    if tensor.is_cuda and tensor.dtype != torch.float64 and tensor.is_contiguous() and triton_available():
        from driftscope.kernels.rows_triton import scaled_copy

        return scaled_copy(tensor, factor, dtype)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) * factor.to(wide)).to(dtype)
