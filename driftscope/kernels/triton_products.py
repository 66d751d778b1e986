"""Products of rows in float64, in Triton."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns in flight at once
WARPS = 4


@triton.jit(do_not_specialize=["N"])
def row_products_kernel(a_ptr, b_ptr, out_ptr, N, D, BLOCK: tl.constexpr):
    """out (3, N) = <a, a>, <a, b>, <b, b> of every row of a, b (N, D), contiguous; grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    aa = tl.zeros((BLOCK,), tl.float64)
    ab = tl.zeros((BLOCK,), tl.float64)
    bb = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, D, BLOCK):
        at = start + columns
        a = tl.load(a_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float64)
        b = tl.load(b_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float64)
        aa += a * a
        ab += a * b
        bb += b * b
    tl.store(out_ptr + row, tl.sum(aa, axis=0))
    tl.store(out_ptr + N + row, tl.sum(ab, axis=0))
    tl.store(out_ptr + 2 * N + row, tl.sum(bb, axis=0))


def row_products(a_ND: Tensor, b_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``products.row_products``, for contiguous float32 or float64 rows."""
    rows, size = a_ND.shape
    out = torch.empty(3, rows, dtype=torch.float64, device=a_ND.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(max(size, 1)))
        row_products_kernel[(rows,)](a_ND, b_ND, out, rows, size, BLOCK=block, num_warps=WARPS)
    aa, ab, bb = out.unbind(0)
    return aa, ab, bb
