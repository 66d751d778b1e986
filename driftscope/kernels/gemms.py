"""The three products of a tile, and the sums of their results over tiles.

Shapes: n rows of a tile, D hidden size, V vocabulary; X (n, V) raw logits, G (n, V) their gradient.

    X = h W^T,  dh = G W,  dW += G^T h  (in float32),  dbias += sum_n G
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLICE_BYTES = 256 << 20  # of a float32 copy, where a product cannot write float32 itself


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        """Whether a backward product is needed at all."""
        return self.hidden or self.weight or self.bias


def raw_logits(buffer: Tensor, hidden_nD: Tensor, weight_VD: Tensor) -> Tensor:
    """X = h W^T, written into the workspace; a view (n, V) of it."""
    tile = buffer[: hidden_nD.shape[0], : weight_VD.shape[0]]
    torch.mm(hidden_nD, weight_VD.t(), out=tile)
    return tile


class GradientSums:
    """dL/dhidden (N, D) in the compute dtype, dL/dweight and dL/dbias in float32, summed over tiles.

    Each row's dL/dhidden is one product over the whole vocabulary, so it is rounded once. Rows never added are zero.
    """

    def __init__(self, needs: Needs, hidden_ND: Tensor, weight_VD: Tensor, *, every_row: bool) -> None:
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        self._weight = weight_VD
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if needs.hidden:
            make = torch.empty_like if every_row else torch.zeros_like
            self.hidden = make(hidden_ND, dtype=weight_VD.dtype, memory_format=torch.contiguous_format)
        if needs.weight:
            self.weight = torch.empty(weight_VD.shape, dtype=wide, device=weight_VD.device)
        if needs.bias:
            self.bias = torch.zeros(weight_VD.shape[0], dtype=wide, device=weight_VD.device)
        self._first = True

    def add(self, tile: Tensor, hidden_nD: Tensor, rows: slice | Tensor) -> None:
        """Add one tile's gradient (n, V); ``rows``: where its rows stand in hidden."""
        if tile.shape[0] == 0:
            return
        if self.hidden is not None:
            if isinstance(rows, slice):
                torch.mm(tile, self._weight, out=self.hidden[rows])
            else:
                self.hidden[rows] = tile @ self._weight
        if self.weight is not None:
            add_product_(self.weight, tile.t(), hidden_nD, first=self._first)
        if self.bias is not None:
            self.bias += tile.sum(0, dtype=self.bias.dtype)
        self._first = False

    def finish(self) -> None:
        """Zero what no tile was added to."""
        if self._first and self.weight is not None:
            self.weight.zero_()


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``total += a @ b`` in total's dtype, never rounding the product to the inputs'; ``first`` overwrites total.

    Needs torch 2.8 to do this in one product on a GPU; older versions take float32 copies of slices.
    """
    if a.dtype == total.dtype:
        if first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif _writes_wide(total):
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        wide_b = b.to(total.dtype)
        step = max(1, SLICE_BYTES // (a.shape[1] * total.element_size()))
        for start in range(0, a.shape[0], step):
            part = slice(start, start + step)
            total[part].addmm_(a[part].to(total.dtype), wide_b, beta=0 if first else 1)


def wide_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a @ b``, (n, D), summed and left in out's dtype, where the inputs (n, V) and (V, D) may be narrower.

    A GPU before torch 2.8 cannot do this in one product; there the result is rounded to the inputs' dtype once.
    """
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif _writes_wide(out):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif out.is_cuda:
        out.copy_(a @ b)
    else:
        step = max(1, SLICE_BYTES // ((a.shape[0] + b.shape[1]) * out.element_size()))
        for start in range(0, a.shape[1], step):
            part = slice(start, start + step)
            out.addmm_(a[:, part].to(out.dtype), b[part].to(out.dtype), beta=0 if start == 0 else 1)


def _writes_wide(out: Tensor) -> bool:
    """Whether a product of narrow inputs can be written in out's wider dtype."""
    return out.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out")
