"""Figures of two gradients a and b from their inner products by module, each with its standard error.

With k buckets and the same hash for both, the products of a row behave as those of k independent samples:

    E <Su, Sv> = <u, v>,   Cov(<Su, Sv>, <Sw, Sz>) = s (<u, w> <v, z> + <u, z> <v, w>),   s <= 1/k

(``SketchLayout.variance``; signs and buckets independent). Rows are independent. Errors of figures follow by the delta
method with the estimates put in; for one row they are |sin t|/sqrt(k) for the log ratio of norms, sin(t)^2/sqrt(k) for
the cosine, 1/sqrt(2k) for a log norm, t being the angle of a and b. Exact products have s = 0 and no error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from driftscope.sketch.gradient import GradientSketch


class Figure(NamedTuple):
    """A value and one standard error of it."""

    value: float
    error: float


class Module(NamedTuple):
    """One module's part: norms of both gradients, their cosine, and its share of |a - b|^2."""

    name: str
    a: float
    b: float
    cosine: float | None
    share: float | None


@dataclass(frozen=True)
class Pair:
    """Inner products of a, b and d = a - b by row, float64 (R,), with s of each row (0: exact) and the rows' names."""

    aa: Tensor
    bb: Tensor
    ab: Tensor
    dd: Tensor
    s: Tensor
    rows: tuple[str, ...]

    @classmethod
    def of(cls, a: GradientSketch, b: GradientSketch) -> Pair:
        """The estimated products of two sketches of one layout. Raises ``UsageError``."""
        d = a.minus(b).rows_RK
        x, y = a.rows_RK, b.rows_RK.to(d.device)
        aa, bb, ab, dd = torch.stack([(x * x).sum(1), (y * y).sum(1), (x * y).sum(1), (d * d).sum(1)]).cpu()
        return cls(aa, bb, ab, dd, torch.tensor(a.layout.variance(), dtype=torch.float64), a.layout.rows)

    def swapped(self) -> Pair:
        """The same of b and a."""
        return replace(self, aa=self.bb, bb=self.aa)


def _sum(values: Tensor) -> float:
    return float(values.sum())


def norm(pair: Pair, side: str = "a") -> Figure:
    """L2 norm of one side, ``a`` or ``b``: sqrt(sum <Sa, Sa>)."""
    square = pair.aa if side == "a" else pair.bb
    total = _sum(square)
    if total <= 0:
        return Figure(0.0, 0.0)
    return Figure(math.sqrt(total), 0.5 * math.sqrt(_sum(2 * pair.s * square**2) / total))


def _ratio_error(top: float, bottom: float, var_top: float, var_bottom: float, cov: float) -> float:
    """Relative standard error of sqrt(top / bottom)."""
    relative = var_top / top**2 + var_bottom / bottom**2 - 2 * cov / (top * bottom)
    return 0.5 * math.sqrt(max(relative, 0.0))


def ratio(pair: Pair) -> Figure | None:
    """|a| / |b|; ``None`` where b is zero."""
    a, b = _sum(pair.aa), _sum(pair.bb)
    if b <= 0:
        return None
    if a <= 0:
        return Figure(0.0, 0.0)
    s = pair.s
    error = _ratio_error(a, b, _sum(2 * s * pair.aa**2), _sum(2 * s * pair.bb**2), _sum(2 * s * pair.ab**2))
    value = math.sqrt(a / b)
    return Figure(value, value * error)


def difference(pair: Pair) -> Figure | None:
    """|a - b| / |b|; ``None`` where b is zero."""
    d, b = _sum(pair.dd), _sum(pair.bb)
    if b <= 0:
        return None
    if d <= 0:
        return Figure(0.0, 0.0)
    s, db = pair.s, pair.ab - pair.bb
    error = _ratio_error(d, b, _sum(2 * s * pair.dd**2), _sum(2 * s * pair.bb**2), _sum(2 * s * db**2))
    value = math.sqrt(d / b)
    return Figure(value, value * error)


def cosine(pair: Pair) -> Figure | None:
    """<a, b> / (|a| |b|); ``None`` where one is zero."""
    a, b, c = _sum(pair.aa), _sum(pair.bb), _sum(pair.ab)
    if a <= 0 or b <= 0:
        return None
    s, size = pair.s, math.sqrt(a * b)
    value = c / size
    var_c = _sum(s * (pair.aa * pair.bb + pair.ab**2)) / size**2
    var_aa, var_bb = _sum(2 * s * pair.aa**2) / a**2, _sum(2 * s * pair.bb**2) / b**2
    cov_ab = _sum(2 * s * pair.ab**2) / (a * b)
    cov_c = _sum(2 * s * pair.aa * pair.ab) / (a * size) + _sum(2 * s * pair.bb * pair.ab) / (b * size)
    variance = var_c + value**2 / 4 * (var_aa + var_bb + 2 * cov_ab) - value * cov_c
    return Figure(min(max(value, -1.0), 1.0), math.sqrt(max(variance, 0.0)))


def modules(pair: Pair, limit: int | None = None) -> list[Module]:
    """The rows, largest share of the squared difference first; those in which both gradients are zero are left out."""
    total = _sum(pair.dd)
    out = []
    for name, aa, bb, ab, dd in zip(
        pair.rows, *(v.tolist() for v in (pair.aa, pair.bb, pair.ab, pair.dd)), strict=True
    ):
        if aa > 0 or bb > 0:
            angle = min(max(ab / math.sqrt(aa * bb), -1.0), 1.0) if aa > 0 and bb > 0 else None
            out.append(Module(name, math.sqrt(aa), math.sqrt(bb), angle, dd / total if total > 0 else None))
    out.sort(key=lambda m: (-(m.share or 0.0), -m.a, m.name))
    return out[:limit]
