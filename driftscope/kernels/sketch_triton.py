"""The count sketch as one pass over a gradient on the GPU: the hash of ``sketch_torch``, bit for bit.

A program owns some buckets and walks over a fixed number of blocks: bucket j takes from block b the coordinate
j XOR r_b. Each coordinate is read once; a program adds in registers (float32, ``RUN`` terms a bucket) and writes its
partial sums, which are added in float64 in a fixed order. No atomics: the same input gives the same bits.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from driftscope.kernels import sketch_torch
from driftscope.kernels.sketch_torch import WORD, Keys

RUN = 64  # blocks of a program: a float32 sum of 64 terms of random sign is good to 2e-7 of its own size
SHORT_RUN = 8  # where there are few blocks, so that the device is filled
FEW_BLOCKS = 8192
COLUMNS = 1024  # buckets of a program
WARPS = 4
SLAB = 1 << 29  # coordinates of a launch: 32 MiB of partial sums, and 32-bit places
M1 = tl.constexpr(sketch_torch.M1)
M2 = tl.constexpr(sketch_torch.M2)
BITS = tl.constexpr(WORD)


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * M1
    h = (h ^ (h >> 13)) * M2
    return h ^ (h >> 16)


@triton.jit(do_not_specialize=["first", "start", "count", "key_block", "key_offset", "key_stream"])
def sketch_kernel(
    values, partial, first, start, count, key_block, key_offset, key_stream,
    K: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """partial[p, j] = signed sum over the p-th run of blocks from ``first`` on.

    Block ``first`` begins at place ``start`` of ``values``, negative where ``values`` begin inside of it. Words of the
    hash come as int32.
    """
    run = tl.program_id(0)
    row = tl.arange(0, COLUMNS // BITS)[:, None]
    column = tl.arange(0, BITS)[None, :]
    j = tl.program_id(1) * COLUMNS + row * BITS + column
    bit = row.to(tl.uint32)
    word = (tl.program_id(1) * BITS + column).to(tl.uint32)
    total = tl.zeros((COLUMNS // BITS, BITS), dtype=tl.float32)
    for i in range(0, RUN, UNROLL):
        for u in tl.static_range(UNROLL):
            block = run * RUN + i + u
            base = _mix((block + first).to(tl.uint32) ^ key_block.to(tl.uint32))
            offset = (_mix(base ^ key_offset.to(tl.uint32)) & (K - 1)).to(tl.int32)
            step = _mix(base ^ key_stream.to(tl.uint32)) | 1
            signs = _mix(base + word * step)
            place = (start + block * K) + (j ^ offset)
            value = tl.load(values + place, mask=(place >= 0) & (place < count), other=0.0).to(tl.float32)
            total += tl.where(((signs >> bit) & 1) != 0, -value, value)
    tl.store(partial + run * K + j, total)


def flat_sketch(flat: Tensor, offset: int, keys: Keys, k: int) -> Tensor:
    """Sketch (k,), float64, of the coordinates offset .. offset + n of a parameter, given as ``flat`` (n,)."""
    out = torch.zeros(k, dtype=torch.float64, device=flat.device)
    for begin in range(0, flat.numel(), SLAB):
        out += _slab(flat[begin : begin + SLAB], offset + begin, keys, k)
    return out


def _slab(flat: Tensor, offset: int, keys: Keys, k: int) -> Tensor:
    first, last = offset // k, (offset + flat.numel() - 1) // k
    blocks = last - first + 1
    run, columns = RUN if blocks > FEW_BLOCKS else SHORT_RUN, min(COLUMNS, k)
    runs = triton.cdiv(blocks, run)
    partial = torch.empty((runs, k), dtype=torch.float32, device=flat.device)
    words = [_signed(word) for word in (first, *keys)]
    numbers = (words[0], first * k - offset, flat.numel(), *words[1:])
    with np.errstate(over="ignore") if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext():
        sketch_kernel[(runs, k // columns)](
            flat, partial, *numbers, K=k, COLUMNS=columns, RUN=run, UNROLL=SHORT_RUN, num_warps=WARPS
        )
    return partial.sum(0, dtype=torch.float64)


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits, so that an argument's type never depends on its value."""
    return word - 2**32 if word >= 2**31 else word
