"""One micro-batch for attribution: coefficients of specs on it, and norms, distances and cosines of loss paths.

A path is an array of token coefficients; all its numbers are sums of the head pass's products with weights from it.
Nothing here looks at the device twice where once will do: sums are stacked and read together, specs that differ only
in their normaliser share one computation, and rows are gathered by index. Shapes: B sequences, T completion tokens,
N rows of the head pass, K paths.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from driftscope.algebra import coefficients, normalizer_value
from driftscope.batch import Coefficients, TokenBatch
from driftscope.spec import LossSpec
from driftscope.spectrum import Spectrum


@dataclass(frozen=True, eq=False)
class PathCoefs:
    """A path's coefficients on the scene's rows, in the directions of one head."""

    head: str
    c_N: Tensor
    e_N: Tensor | None = None
    measured_norm: float | None = None  # the norm of the measured gradient, where there is one


@dataclass(frozen=True)
class Relations:
    """Inner products of the hidden gradients of some paths, and |a - b|^2 of every two of them."""

    paths: tuple[PathCoefs, ...]
    inner: tuple[tuple[float, ...], ...]
    squares: tuple[tuple[float, ...], ...]

    def product(self, path: PathCoefs, other: PathCoefs) -> float:
        """<path, other> summed over the tokens. Raises ``KeyError`` for a path that is not among these."""
        return self.inner[self._at(path)][self._at(other)]

    def norm(self, path: PathCoefs) -> float:
        """Hidden gradient norm of a path, the measured one where there is one."""
        if path.measured_norm is not None:
            return path.measured_norm
        return _root(self.product(path, path))

    def distance(self, path: PathCoefs, other: PathCoefs) -> float:
        """Relative distance |path - other| / |other|; ``inf`` where only other is zero."""
        square = self.squares[self._at(path)][self._at(other)]
        return _relative(square, self.product(path, path), self.product(other, other))

    def cosine(self, path: PathCoefs, other: PathCoefs) -> float | None:
        """Cosine of two hidden gradients, or ``None`` where one is zero."""
        scale = math.sqrt(self.product(path, path) * self.product(other, other))
        return max(-1.0, min(1.0, self.product(path, other) / scale)) if scale > 0 else None

    def _at(self, path: PathCoefs) -> int:
        for i, known in enumerate(self.paths):
            if known is path:
                return i
        raise KeyError(path)


@dataclass
class Scene:
    """One micro-batch: a batch per head (their log-probs differ), and the shared head pass.

    rows_BT: bool, the positions that the head pass covered, N in all.
    """

    batches: dict[str, TokenBatch]
    spectrum: Spectrum
    rows_BT: Tensor
    _made: dict[tuple[LossSpec, str], Coefficients] = field(default_factory=dict, repr=False)
    _paths: dict[tuple[LossSpec, str], PathCoefs] = field(default_factory=dict, repr=False)
    _families: dict[tuple[LossSpec, str], tuple[PathCoefs, float]] = field(default_factory=dict, repr=False)
    _divisors: dict[Hashable, float | None] = field(default_factory=dict, repr=False)
    _wide: dict[str, TokenBatch] = field(default_factory=dict, repr=False)
    _index_N: Tensor | None = field(default=None, repr=False)

    def coefficients(self, spec: LossSpec, head: str) -> Coefficients:
        """float64 loss and coefficients of a spec on this head's log-probs, cached."""
        key = (spec, head)
        if key not in self._made:
            if head not in self._wide:
                self._wide[head] = self.batches[head].to(torch.float64)
            self._made[key] = coefficients(spec, self._wide[head], torch.float64)
        return self._made[key]

    def path(self, spec: LossSpec, head: str) -> PathCoefs:
        """The coefficients of a spec on the rows of the head pass, cached.

        A normaliser that is one number divides the policy term and the KL, and with them every c; the entropy bonus
        has a mean of its own. So one computation serves every spec that differs in such a normaliser alone.
        """
        key = (spec, head)
        if key not in self._paths:
            self._paths[key] = self._scaled(spec, head) or self._new(spec, head)
        return self._paths[key]

    def is_cheap(self, spec: LossSpec, head: str) -> bool:
        """Whether ``path`` needs no new computation of coefficients."""
        return (spec, head) in self._paths or (spec, head) in self._made or _family(spec, head) in self._families

    def _new(self, spec: LossSpec, head: str) -> PathCoefs:
        made = self.coefficients(spec, head)
        path = self.at_rows(made, head)
        if made.normalizer:
            self._families.setdefault(_family(spec, head), (path, made.normalizer))
        return path

    def _scaled(self, spec: LossSpec, head: str) -> PathCoefs | None:
        """The path from one that differs in its divisor alone, or ``None`` where there is none such."""
        known = _family(spec, head)
        if known not in self._families or (spec, head) in self._made:
            return None
        divisor = self.divisor(spec)
        path, own = self._families[known]
        return PathCoefs(head, path.c_N * (own / divisor), path.e_N) if divisor else None

    def divisor(self, spec: LossSpec) -> float | None:
        """The normaliser of a spec on this batch, as ``normalizer_value``, cached."""
        key = (
            spec.effective_normalizer, spec.tool_mask, spec.accumulation_steps, spec.steps_per_generation,
            spec.num_processes, spec.max_completion_length,
        )  # fmt: skip
        if key not in self._divisors:
            self._divisors[key] = normalizer_value(spec, next(iter(self.batches.values())))
        return self._divisors[key]

    def at_rows(self, made: Coefficients, head: str) -> PathCoefs:
        """Coefficients (B, T) as those of a path on the rows of the head pass."""
        e_BT = made.entropies_BT
        return PathCoefs(
            head, self.rows_of(made.logps_BT).double(), None if e_BT is None else self.rows_of(e_BT).double()
        )

    def rows_of(self, values_BT: Tensor) -> Tensor:
        """Values (B, T), or what broadcasts to it, on the rows of the head pass."""
        if self._index_N is None:
            self._index_N = self.rows_BT.reshape(-1).nonzero().squeeze(-1)
        return values_BT.expand(self.rows_BT.shape).reshape(-1)[self._index_N]

    def norm(self, path: PathCoefs) -> float:
        """Hidden gradient norm of a path."""
        return _root(self.squares((path,))[0]) if path.measured_norm is None else path.measured_norm

    def squares(self, paths: Sequence[PathCoefs]) -> list[float]:
        """Squared hidden gradient norms of several paths, read together; the measured ones where there are any."""
        summed = [p for p in paths if p.measured_norm is None]
        parts = [self.spectrum.squared_N(p.head, p.c_N, p.e_N).sum().clamp(min=0) for p in summed]
        read = iter(torch.stack(parts).tolist() if parts else ())
        return [next(read) if p.measured_norm is None else p.measured_norm**2 for p in paths]

    def distances(self, candidates: Sequence[PathCoefs], path: PathCoefs) -> list[float]:
        """|candidate - path| / |path| of candidates on the path's own head, read together."""
        c_KN, e_KN = self._stacked((path, *candidates))
        away_KN = c_KN[1:] - c_KN[0]
        entropies_KN = None if e_KN is None else e_KN[1:] - e_KN[0]
        away = self.spectrum.squared_N(path.head, away_KN, entropies_KN).sum(-1)
        own = self.spectrum.squared_N(path.head, path.c_N, path.e_N).sum()
        size, *squares = torch.cat([own[None], away]).tolist()
        # Where the path is zero, |candidate - path|^2 is |candidate|^2.
        return [_relative(square, square, size) for square in squares]

    def distance(self, path: PathCoefs, other: PathCoefs) -> float:
        """Relative distance |path - other| / |other| of two hidden gradients; ``inf`` where only one is zero."""
        return self.relate((path, other)).distance(path, other)

    def cosine(self, path: PathCoefs, other: PathCoefs) -> float | None:
        """Cosine of two hidden gradients, or ``None`` where one is zero."""
        return self.relate((path, other)).cosine(path, other)

    def relate(self, paths: Sequence[PathCoefs]) -> Relations:
        """Inner products and distances of every two of the paths, read together."""
        unique = tuple({id(path): path for path in paths}.values())
        groups: dict[str, list[int]] = {}
        for i, path in enumerate(unique):
            groups.setdefault(path.head, []).append(i)
        places, parts = [], []
        for head, at in groups.items():
            c_KN, e_KN = self._stacked([unique[i] for i in at])
            apart = None if e_KN is None else e_KN[:, None] - e_KN
            squares = self.spectrum.squared_N(head, c_KN[:, None] - c_KN, apart).sum(-1)
            parts += [self._products(head, c_KN, e_KN).flatten(), squares.flatten()]
            places += [(True, i, j) for i in at for j in at] + [(False, i, j) for i in at for j in at]
            for other, there in groups.items():
                if other != head:
                    others_KN = torch.stack([unique[j].c_N for j in there])
                    parts.append(((c_KN * self._cross(head, other))[:, None] * others_KN).sum(-1).flatten())
                    places += [(True, i, j) for i in at for j in there]
        return _tables(unique, places, torch.cat(parts).tolist() if parts else [])

    def _products(self, head: str, c_KN: Tensor, e_KN: Tensor | None) -> Tensor:
        """Inner products of paths on one head, (K, K)."""
        v = self.spectrum.views[head]
        total = (c_KN * v.uu_N)[:, None] * c_KN
        if e_KN is not None and v.ww_N is not None and v.uw_N is not None:
            total = total + (e_KN * v.ww_N)[:, None] * e_KN
            total = total + (c_KN[:, None] * e_KN + e_KN[:, None] * c_KN) * v.uw_N
        return total.sum(-1)

    def _cross(self, head: str, other: str) -> Tensor:
        cross = self.spectrum.cross_N.get((head, other))
        return self.spectrum.cross_N[(other, head)] if cross is None else cross

    def _stacked(self, paths: Sequence[PathCoefs]) -> tuple[Tensor, Tensor | None]:
        """c and, where the head pass has entropy directions, e of paths on one head, (K, N) each."""
        c_KN = torch.stack([p.c_N for p in paths])
        if self.spectrum.views[paths[0].head].ww_N is None or all(p.e_N is None for p in paths):
            return c_KN, None
        return c_KN, torch.stack([torch.zeros_like(p.c_N) if p.e_N is None else p.e_N for p in paths])


def _family(spec: LossSpec, head: str) -> tuple[LossSpec, str]:
    """What specs share that differ in their normaliser alone."""
    return spec.replace(normalizer=None), head


def _tables(
    paths: tuple[PathCoefs, ...], places: Sequence[tuple[bool, int, int]], values: Sequence[float]
) -> Relations:
    """Inner products and squared distances from what was read; across heads |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b>."""
    inner: dict[tuple[int, int], float] = {}
    apart: dict[tuple[int, int], float] = {}
    for (is_inner, i, j), value in zip(places, values, strict=True):
        (inner if is_inner else apart)[(i, j)] = value
    some = range(len(paths))

    def square(i: int, j: int) -> float:
        known = apart.get((i, j))
        return inner[i, i] + inner[j, j] - 2 * inner[i, j] if known is None else known

    return Relations(
        paths,
        tuple(tuple(inner[i, j] for j in some) for i in some),
        tuple(tuple(square(i, j) for j in some) for i in some),
    )


def _relative(square: float, own: float, other: float) -> float:
    """|a - b| / |b| from |a - b|^2, |a|^2 and |b|^2."""
    if other <= 0:
        return 0.0 if own <= 0 else math.inf
    return math.sqrt(max(square, 0.0) / other)


def _root(square: float) -> float:
    return math.sqrt(max(square, 0.0))
