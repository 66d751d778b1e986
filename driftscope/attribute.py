"""Attribution: which terms of the configured loss a path leaves out, and what each does to the gradient norm.

A path is identified by measurement, not by a table of versions: of all specs that differ from a base spec by dropping
terms or by another normaliser, the one with the fewest changes whose float64 coefficients match the path's own. Each
change's factor is its Shapley value of the log hidden gradient norm (Shapley 1953), so that factors multiply to the
gap whatever the order. What the changes do not explain is kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from driftscope.errors import UsageError
from driftscope.explanation import Explanation
from driftscope.scene import PathCoefs, Scene
from driftscope.spec import LossSpec, Normalizer

__all__ = ["Change", "Identified", "PathCoefs", "Scene", "attribute", "identify", "possible_changes"]

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
    Errors are read from the device together, as far as no further coefficients need computing.
    """
    fixed = () if path.head == base_head else (Change(head_cause or "logit_transform", head=path.head),)
    best: Identified | None = None
    waiting: list[tuple[LossSpec, tuple[Change, ...], PathCoefs]] = []

    def look() -> bool:
        """Judge what is waiting, in order; whether one is the path's own."""
        nonlocal best
        errors = scene.distances([made for _, _, made in waiting], path) if waiting else []
        for (spec, chosen, _), error in zip(waiting, errors, strict=True):
            if best is None or error < best.error / 2:  # one more change must at least halve what is left
                best = Identified(spec, path.head, (*chosen, *fixed), error)
            if best.error <= tolerance:
                return True
        waiting.clear()
        return False

    for chosen in _choices(possible_changes(base)):
        spec = base
        for change in chosen:
            spec = change.apply(spec)
        if not scene.is_cheap(spec, path.head) and look():
            break
        try:
            waiting.append((spec, chosen, scene.path(spec, path.head)))
        except UsageError:  # a spec whose inputs this batch lacks is no candidate
            continue
    else:
        look()
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

    def changed(coalition: frozenset[str]) -> PathCoefs:
        spec, head = base, base_head
        for cause in sorted(coalition):
            spec, head = by_id[cause].apply(spec), by_id[cause].head or head
        return scene.path(spec, head)

    subsets = [frozenset(c) for size in range(len(by_id) + 1) for c in combinations(by_id, size)]
    actual, *squares = scene.squares([path, *(changed(chosen) for chosen in subsets)])
    return Explanation(
        details={cause: _say(change) for cause, change in by_id.items()},
        squares=dict(zip(subsets, squares, strict=True)),
        actual=actual,
        left=found.error**2 * actual if math.isfinite(found.error) else math.inf,
        tolerance=tolerance,
    )


def _say(change: Change) -> str:
    if change.head is not None:
        return "log-probs come from lm_head.weight alone, without what the model does to its logits"
    return ", ".join(f"{name}={value!r}" for name, value in change.fields)
