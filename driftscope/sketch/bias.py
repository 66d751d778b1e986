"""A bias of a gradient over many steps, told from noise: the mean of sketches of the signed relative difference.

    d_t = (a_t - b_t) / |b_t|,   U = (|sum d_t|^2 - sum |d_t|^2) / (n (n - 1))

U is an unbiased estimate of |E d|^2 over the n steps, whatever the noise of one step: it averages the products of
different steps, in which independent noise cancels. All steps share one hash, so that sums of sketches are sketches.

Its standard error under no bias is sqrt(2 tr(C^2) / (n (n - 1))), C the covariance of d_t. tr(C^2) is estimated from
signs that alternate: with w_t = sum_{s<=t} (-1)^s d_s, the products <d_t, w_{t-1}> have the expected square
(t - 1) tr(C^2), and a constant bias cancels in them; never less than tr(C)^2 over the sketch's dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.sketch.estimates import Figure
from driftscope.sketch.gradient import GradientSketch
from driftscope.sketch.layout import SketchLayout

HEADER = 7  # numbers before the arrays in a saved state


@dataclass(frozen=True)
class Bias:
    """What the steps so far say.

    size: |E d|. noise: root mean square of |d_t|. score: U in its standard errors under no bias. along: mean of
    <d_t, b_t> / |b_t|, -0.01 where a is 1% too short. module: row with the largest part of U; along_module: of along.
    """

    steps: int
    size: Figure
    noise: float
    score: float
    along: Figure
    module: str | None
    along_module: str | None


class BiasTracker:
    """The running sums: two sketches and a few numbers, whatever the number of steps."""

    def __init__(self, layout: SketchLayout) -> None:
        self.layout = layout
        self.steps = 0
        self.skipped = 0
        shape = (len(layout.rows), layout.size)
        self._sum = torch.zeros(shape, dtype=torch.float64)
        self._alternating = torch.zeros(shape, dtype=torch.float64)
        self._squares = torch.zeros(shape[0], dtype=torch.float64)
        self._products = 0.0  # sum of <d_t, w_{t-1}>^2
        self._along = torch.zeros(shape[0], dtype=torch.float64)
        self._along_squares = 0.0

    def add(self, difference: GradientSketch, size: float, along_R: Tensor) -> bool:
        """Take one step: the sketch of a - b, |b|, and <a - b, b> / |b|^2 by row, (R,).

        False, and not counted, where something is not finite or b is zero.

        Raises ``UsageError`` for a sketch of another layout, another seed included.
        """
        if difference.layout != self.layout:
            raise UsageError(
                "a bias is the mean of sketches under one hash: the layout has changed between the steps."
            )
        rows, along_R = difference.rows_RK.cpu(), along_R.double().cpu()
        along = float(along_R.sum())
        if not size > 0 or not math.isfinite(size + along) or not bool(torch.isfinite(rows).all()):
            self.skipped += 1
            return False
        d = rows / size
        self._products += float((d * self._alternating).sum()) ** 2
        self._sum += d
        self._alternating += d if self.steps % 2 else -d
        self._squares += (d * d).sum(1)
        self._along += along_R
        self._along_squares += along * along
        self.steps += 1
        return True

    def read(self) -> Bias | None:
        """The bias so far; ``None`` before the second step."""
        n = self.steps
        if n < 2:
            return None
        pairs = n * (n - 1)
        by_row = ((self._sum * self._sum).sum(1) - self._squares) / pairs
        square, mean_square = float(by_row.sum()), float(self._squares.sum()) / n
        trace = max(mean_square - max(square, 0.0), 0.0)
        spread = max(2 * self._products / pairs, trace**2 / self._sum.numel())  # tr(C^2)
        null = math.sqrt(2 * spread / pairs)
        return Bias(
            steps=n,
            size=self._size(square, by_row, null, spread),
            noise=math.sqrt(mean_square),
            score=square / null if null > 0 else 0.0,
            along=self._mean_along(),
            module=self.layout.rows[int(by_row.argmax())] if square > 0 else None,
            along_module=self.layout.rows[int(self._along.abs().argmax())] if bool(self._along.any()) else None,
        )

    def _size(self, square: float, by_row: Tensor, null: float, spread: float) -> Figure:
        """sqrt(U): noise of the steps (the largest variance of C is at most sqrt(tr C^2)) and of the hash."""
        steps = null**2 + 4 * max(square, 0.0) * math.sqrt(spread) / self.steps
        hash_ = float((2 * torch.tensor(self.layout.variance(), dtype=torch.float64) * by_row**2).sum())
        error = math.sqrt(steps + hash_)
        if square <= 0:
            return Figure(0.0, math.sqrt(error))
        return Figure(math.sqrt(square), min(0.5 * error / math.sqrt(square), math.sqrt(error)))

    def _mean_along(self) -> Figure:
        n, mean = self.steps, float(self._along.sum()) / self.steps
        variance = max(self._along_squares / n - mean**2, 0.0) * n / (n - 1)
        return Figure(mean, math.sqrt(variance / n))

    def state(self) -> Tensor:
        """Everything as one float64 array on the CPU, 7 + 2 R + 2 R k numbers, to go on from in a resumed run."""
        head = [self.steps, self.skipped, self._products, self._along_squares, *self._fingerprint()]
        parts = (self._squares, self._along, self._sum.reshape(-1), self._alternating.reshape(-1))
        return torch.cat([torch.tensor(head, dtype=torch.float64), *parts])

    @classmethod
    def from_state(cls, layout: SketchLayout, state: Tensor) -> BiasTracker:
        """The tracker of a saved state. Raises ``UsageError`` where it belongs to another layout."""
        made = cls(layout)
        rows, cells = made._squares.numel(), made._sum.numel()
        flat = state.to(torch.float64).reshape(-1)
        if flat.numel() != HEADER + 2 * (rows + cells) or flat[4:HEADER].tolist() != made._fingerprint():
            raise UsageError("the saved bias belongs to another model, sketch size or seed; begin a new one.")
        made.steps, made.skipped = int(flat[0]), int(flat[1])
        made._products, made._along_squares = flat[2:4].tolist()
        parts = flat[HEADER:].split([rows, rows, cells, cells])
        for target, part in zip((made._squares, made._along, made._sum, made._alternating), parts, strict=True):
            target.copy_(part.view_as(target))
        return made

    def _fingerprint(self) -> list[float]:
        names = "\n".join(self.layout.row_of)
        return [float(self.layout.size), float(self.layout.seed), float(crc32(names.encode()))]
