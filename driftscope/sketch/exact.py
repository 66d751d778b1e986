"""Gradients that are small enough to be kept: the same products as a sketch gives, without error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from driftscope.sketch.estimates import Pair
from driftscope.sketch.gradient import GradientSketch
from driftscope.sketch.layout import SketchLayout

Gradient = Callable[[str], Tensor | None]
"""Parameter name -> gradient, ``None`` for zero."""


class ExactGradient:
    """Gradients by parameter, summed in float32 (float64 where they are float64) whatever their own dtype is."""

    def __init__(self, layout: SketchLayout) -> None:
        self.layout = layout
        self.grads: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor, *, scale: float = 1.0) -> None:
        """Add ``scale`` times a parameter's gradient."""
        wide = widened(grad, scale)
        if name in self.grads:
            self.grads[name] += wide
        else:
            self.grads[name] = wide.clone() if wide.data_ptr() == grad.data_ptr() else wide

    def nonfinite(self) -> list[str]:
        """Modules whose gradient holds NaN or infinity."""
        bad = {self.layout.row_of[n] for n, g in self.grads.items() if not bool(torch.isfinite(g).all())}
        return [self.layout.rows[i] for i in sorted(bad)]


def widened(grad: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` times a gradient in float32, float64 where it is float64."""
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    wide = grad if grad.dtype == torch.float64 else grad.to(torch.float32)
    return wide if scale == 1.0 else wide * scale


def exact_pair(a: Gradient, b: Gradient, layout: SketchLayout, difference: GradientSketch | None = None) -> Pair:
    """The products of two gradients, parameter by parameter, sums in float64.

    difference: a sketch that a - b is added to, where it is wanted.
    """
    products = torch.zeros(4, len(layout.rows), dtype=torch.float64)
    for name, row in layout.row_of.items():
        x, y = a(name), b(name)
        if x is None and y is None:
            continue
        x = torch.zeros_like(y) if x is None and y is not None else x
        y = torch.zeros_like(x) if y is None and x is not None else y
        assert x is not None
        assert y is not None
        d = x - y
        products[:, row] += torch.stack([_dot(x, x), _dot(y, y), _dot(x, y), _dot(d, d)]).cpu()
        if difference is not None:
            difference.add(name, d)
    aa, bb, ab, dd = products
    return Pair(aa, bb, ab, dd, torch.zeros_like(aa), layout.rows)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum()
