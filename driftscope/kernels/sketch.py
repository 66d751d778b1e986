"""One row of a gradient sketch: which implementation runs, and what it may be given."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.kernels import sketch_torch
from driftscope.kernels.rows import triton_available
from driftscope.kernels.sketch_torch import Keys

PIECE_ELEMENTS = 1 << 23  # of a non-contiguous gradient that is copied at a time
LARGEST = 1 << 22
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sketch_row(values: Tensor, keys: Keys, size: int, offset: int = 0) -> Tensor:
    """Count sketch (size,) of a parameter's gradient or of a shard of it, float64, on the gradient's device.

    values: any shape and layout, floating point; in row-major order they are the parameter's coordinates from
    ``offset`` on (rows [a, b) of a (R, C) parameter: offset = a C). size: buckets, a power of two of at least 64.
    A shard's sketch adds up with the others' to that of the whole. A value that is not finite makes its bucket so.

    Sums are float32 over at most 64 terms and float64 beyond on a GPU, float64 elsewhere. Raises ``UsageError``.
    """
    if not 64 <= size <= LARGEST or size & (size - 1):
        raise UsageError(f"size={size!r} of a sketch must be a power of two from 64 to {LARGEST}.")
    if values.dtype not in FLOATS:
        raise UsageError(f"a gradient of {values.dtype} cannot be sketched: it must be a real floating-point type.")
    if offset < 0 or (offset + values.numel()) // size >= 2**32:
        raise UsageError(f"offset={offset!r} lies outside of what the hash of a sketch of {size} buckets covers.")
    values = values.detach()
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_contiguous() or values.numel() <= PIECE_ELEMENTS:
        return _flat(values.reshape(-1).contiguous(), offset, keys, size)  # an expanded one is flat, yet not in memory
    if values.dim() > 1 and values.shape[0] == 1:
        return sketch_row(values[0], keys, size, offset)
    inner = values.numel() // values.shape[0]
    out = torch.zeros(size, dtype=torch.float64, device=values.device)
    for start, piece in _pieces(values, max(1, PIECE_ELEMENTS // inner)):
        out += sketch_row(piece, keys, size, offset + start * inner)
    return out


def _pieces(values: Tensor, rows: int) -> list[tuple[int, Tensor]]:
    return [(start, values[start : start + rows]) for start in range(0, values.shape[0], rows)]


def _flat(flat: Tensor, offset: int, keys: Keys, size: int) -> Tensor:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    fast = flat.dtype != torch.float64 and (flat.device.type == "cuda" or interpreted)
    if fast and flat.numel() and triton_available():
        from driftscope.kernels import sketch_triton

        return sketch_triton.flat_sketch(flat, offset, keys, size)
    return sketch_torch.flat_sketch(flat, offset, keys, size)
