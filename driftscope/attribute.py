"""Attribution: which terms of the configured loss a path leaves out, and what each does to the gradient norm.

A path is identified by measurement, not by a table of versions: of all specs that differ from a base spec by dropping
terms or by another normaliser, the one with the fewest changes whose float64 coefficients match the path's own. Each
change's factor is its Shapley value of the log hidden gradient norm (Shapley 1953), so that factors multiply to the
gap whatever the order. What the changes do not explain is kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from driftscope.algebra import coefficients
from driftscope.batch import Coefficients, TokenBatch
from driftscope.errors import UsageError
from driftscope.explanation import Explanation
from driftscope.spec import LossSpec, Normalizer
from driftscope.spectrum import Spectrum

_TOKEN_SUMS: tuple[Normalizer, ...] = (
    "micro_batch_over_ranks",
    "micro_batch",
    "generation_batch",
    "generation_batch_rescaled",
    "max_length",
)


@dataclass(frozen=True)
class Change:
    """One way a path can differ from a spec: the cause's id, the changed fields, or another head."""

    cause: str
    fields: tuple[tuple[str, object], ...] = ()
    head: str | None = None

    def apply(self, spec: LossSpec) -> LossSpec:
        return spec.replace(**dict(self.fields)) if self.fields else spec


@dataclass(frozen=True)
class PathCoefs:
    """A path's coefficients on the scene's rows, in the directions of one head."""

    head: str
    c_N: Tensor
    e_N: Tensor | None = None
    measured_norm: float | None = None  # the norm of the measured gradient, where there is one


@dataclass
class Scene:
    """One micro-batch for attribution: a batch per head (their log-probs differ), and the shared head pass.

    rows_BT: bool, the positions that the head pass covered, N in all.
    """

    batches: dict[str, TokenBatch]
    spectrum: Spectrum
    rows_BT: Tensor
    _cache: dict[Hashable, Coefficients] = field(default_factory=dict)

    def coefficients(self, spec: LossSpec, head: str) -> Coefficients:
        """float64 loss and coefficients of a spec on this head's log-probs, cached."""
        key = (spec, head)
        if key not in self._cache:
            self._cache[key] = coefficients(spec, self.batches[head], torch.float64)
        return self._cache[key]

    def path(self, spec: LossSpec, head: str) -> PathCoefs:
        """The coefficients of a spec, on the rows of the head pass."""
        made = self.coefficients(spec, head)
        return self.at_rows(made, head)

    def at_rows(self, made: Coefficients, head: str) -> PathCoefs:
        """Coefficients (B, T) as those of a path on the rows of the head pass."""
        e_BT = made.entropies_BT
        return PathCoefs(
            head, made.logps_BT[self.rows_BT].double(), None if e_BT is None else e_BT[self.rows_BT].double()
        )

    def norm(self, path: PathCoefs) -> float:
        """Hidden gradient norm of a path."""
        if path.measured_norm is not None:
            return path.measured_norm
        return self.spectrum.norm(path.head, path.c_N, path.e_N)

    def distance(self, path: PathCoefs, other: PathCoefs) -> float:
        """Relative distance |path - other| / |other| of two hidden gradients; ``inf`` where only one is zero."""
        a, b = self._inner(path, path), self._inner(other, other)
        square = a + b - 2 * self._inner(path, other)
        if path.head == other.head:  # exact where the two are nearly equal
            e = None if path.e_N is None and other.e_N is None else _minus(path.e_N, other.e_N)
            square = float(self.spectrum.squared_N(path.head, path.c_N - other.c_N, e).sum())
        if b <= 0:
            return 0.0 if a <= 0 else math.inf
        return math.sqrt(max(square, 0.0) / b)

    def cosine(self, path: PathCoefs, other: PathCoefs) -> float | None:
        """Cosine of two hidden gradients, or ``None`` where one is zero."""
        scale = math.sqrt(self._inner(path, path) * self._inner(other, other))
        return max(-1.0, min(1.0, self._inner(path, other) / scale)) if scale > 0 else None

    def _inner(self, path: PathCoefs, other: PathCoefs) -> float:
        if path.head == other.head:
            v = self.spectrum.views[path.head]
            total = path.c_N * other.c_N * v.uu_N
            if v.ww_N is not None and v.uw_N is not None:
                a = path.e_N if path.e_N is not None else torch.zeros_like(path.c_N)
                b = other.e_N if other.e_N is not None else torch.zeros_like(other.c_N)
                total = total + a * b * v.ww_N + (path.c_N * b + a * other.c_N) * v.uw_N
            return float(total.sum())
        pair = (path.head, other.head)
        cross = self.spectrum.cross_N.get(pair)
        if cross is None:
            cross = self.spectrum.cross_N[(pair[1], pair[0])]
        return float((path.c_N * other.c_N * cross).sum())


@dataclass(frozen=True)
class Identified:
    """The spec that a path realises: ``changes`` against the base, and the error left, relative."""

    spec: LossSpec
    head: str
    changes: tuple[Change, ...]
    error: float


def possible_changes(spec: LossSpec) -> list[list[Change]]:
    """The ways a path can differ from ``spec``, grouped: at most one change of a group applies."""
    groups: list[list[Change]] = []
    if spec.is_correction:
        groups.append([Change("is_correction", (("is_correction", False),))])
    if spec.tool_mask:
        groups.append([Change("tool_mask", (("tool_mask", False),))])
    if spec.beta != 0.0 and spec.kl_bias_correction:
        groups.append([Change("kl_bias_correction", (("kl_bias_correction", False),))])
    if spec.entropy_coef != 0.0:
        groups.append([Change("extra_terms", (("entropy_coef", 0.0),))])
    if spec.delta is not None:
        groups.append([Change("delta_clamp", (("delta", None),))])
    if spec.effective_normalizer in _TOKEN_SUMS:
        others = [n for n in _TOKEN_SUMS if n != spec.effective_normalizer]
        if spec.max_completion_length is None and "max_length" in others:
            others.remove("max_length")
        if spec.num_processes == 1 and "micro_batch_over_ranks" in others:
            others.remove("micro_batch_over_ranks")
        groups.append([Change("normalizer", (("normalizer", n),)) for n in others])
    elif spec.loss_type == "luspo":
        groups.append([Change("normalizer", (("normalizer", "length_weighted"),))])
    return groups


def identify(
    scene: Scene, base: LossSpec, base_head: str, path: PathCoefs, *, tolerance: float, head_cause: str | None = None
) -> Identified:
    """The spec nearest to ``path`` among those that drop terms of ``base``: fewest changes first.

    tolerance: relative error at which a spec counts as the path's own. ``head_cause``: cause id of another head.
    """
    fixed = () if path.head == base_head else (Change(head_cause or "logit_transform", head=path.head),)
    best: Identified | None = None
    for chosen in _choices(possible_changes(base)):
        spec = base
        for change in chosen:
            spec = change.apply(spec)
        try:
            error = scene.distance(scene.path(spec, path.head), path)
        except UsageError:  # a spec whose inputs this batch lacks is no candidate
            continue
        if best is None or error < best.error / 2:  # one more change must at least halve what is left
            best = Identified(spec, path.head, (*chosen, *fixed), error)
        if best.error <= tolerance:
            break
    return best or Identified(base, path.head, fixed, math.inf)


def _choices(groups: Sequence[Sequence[Change]]) -> Iterable[tuple[Change, ...]]:
    """All picks of at most one change a group, those with fewer changes first."""
    for count in range(len(groups) + 1):
        for picked in combinations(groups, count):
            stack: list[tuple[Change, ...]] = [()]
            for group in picked:
                stack = [(*done, change) for done in stack for change in group]
            yield from stack


def attribute(
    scene: Scene, base: LossSpec, base_head: str, path: PathCoefs, found: Identified, *, tolerance: float
) -> Explanation:
    """What the changes of ``found`` make of the base spec, and what they leave of the gap to ``path``."""
    by_id = {change.cause: change for change in found.changes}

    def square(coalition: frozenset[str]) -> float:
        spec, head = base, base_head
        for cause in sorted(coalition):
            spec, head = by_id[cause].apply(spec), by_id[cause].head or head
        return scene.norm(scene.path(spec, head)) ** 2

    subsets = [frozenset(c) for size in range(len(by_id) + 1) for c in combinations(by_id, size)]
    actual = scene.norm(path) ** 2
    return Explanation(
        details={cause: _say(change) for cause, change in by_id.items()},
        squares={chosen: square(chosen) for chosen in subsets},
        actual=actual,
        left=found.error**2 * actual if math.isfinite(found.error) else math.inf,
        tolerance=tolerance,
    )


def _say(change: Change) -> str:
    if change.head is not None:
        return "log-probs come from lm_head.weight alone, without what the model does to its logits"
    return ", ".join(f"{name}={value!r}" for name, value in change.fields)


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None:
        assert b is not None
        return -b
    return a if b is None else a - b
