"""The sketch of one gradient: R rows (modules) of k buckets. It adds over micro-batches, shards and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.kernels.sketch import sketch_row
from driftscope.kernels.sketch_torch import keys_of
from driftscope.sketch.layout import SketchLayout


class GradientSketch:
    """``rows_RK``: the sketch, float64, on the device of the first gradient.

    float64, because a bias is a small difference of two sketches; the memory is that of R k numbers.
    """

    def __init__(self, layout: SketchLayout, rows_RK: Tensor | None = None) -> None:
        self.layout = layout
        self._rows = rows_RK

    @property
    def rows_RK(self) -> Tensor:
        """The sketch; zeros on the CPU where nothing was added."""
        if self._rows is None:
            self._rows = torch.zeros(len(self.layout.rows), self.layout.size, dtype=torch.float64)
        return self._rows

    def add(self, name: str, grad: Tensor, *, offset: int = 0, scale: float = 1.0) -> None:
        """Add ``scale`` times a parameter's gradient, or a shard of it.

        grad: floating point, any shape; in row-major order the coordinates from ``offset`` on of the whole parameter.
        Nothing of its size is kept. Raises ``UsageError`` for a parameter that the layout does not know.
        """
        if name not in self.layout.row_of:
            raise UsageError(f"parameter {name!r} is not in the sketch's layout; build one from the model's names.")
        made = sketch_row(grad, keys_of(self.layout.seed, self.layout.index_of[name]), self.layout.size, offset)
        if self._rows is None:
            self._rows = made.new_zeros(len(self.layout.rows), self.layout.size)
        self._rows[self.layout.row_of[name]] += made.to(self._rows.device) * scale

    def minus(self, other: GradientSketch) -> GradientSketch:
        """Sketch of the difference of the two gradients. Raises ``UsageError`` for other layouts."""
        if self.layout != other.layout:
            raise UsageError("sketches of two layouts (other modules, size or seed) cannot be subtracted.")
        return GradientSketch(self.layout, self.rows_RK - other.rows_RK.to(self.rows_RK.device))

    def nonfinite(self) -> list[str]:
        """Modules whose gradient held NaN or infinity: what was not finite stays so in its bucket."""
        bad = (~torch.isfinite(self.rows_RK)).any(1).nonzero().squeeze(1).tolist()
        return [self.layout.rows[i] for i in bad]
