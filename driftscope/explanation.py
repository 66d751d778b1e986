"""What attribution measured of a gap, as numbers that add up over ranks, and the causes that they make.

Squared hidden gradient norms of disjoint sets of tokens add up, so the explanation of a global batch is the sum of its
ranks' explanations. Each change's factor is its Shapley value of the log norm (Shapley 1953), so that factors multiply
to the gap whatever the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from driftscope.records import Cause, Unexplained


@dataclass(frozen=True)
class Explanation:
    """A path against its base spec.

    details: cause id -> what changes. squares: set of causes -> squared hidden gradient norm of the base spec with
    these changes. actual: squared norm of the path. left: squared distance of the path from the base spec with all
    changes; infinite where they cannot be compared. tolerance: relative distance that counts as none.
    """

    details: dict[str, str]
    squares: dict[frozenset[str], float]
    actual: float
    left: float
    tolerance: float

    @property
    def error(self) -> float:
        """Relative distance of the path from what the changes make."""
        if self.actual <= 0:
            return 0.0 if self.left <= 0 else math.inf
        return math.sqrt(self.left / self.actual)

    def causes(self) -> tuple[list[Cause], Unexplained]:
        """Causes of the gap, largest share first, and what they leave."""
        effects = shapley(list(self.details), lambda chosen: 0.5 * _log(self.squares[chosen]))
        explained, actual = math.sqrt(self.squares[frozenset(self.details)]), math.sqrt(max(self.actual, 0.0))
        left, error = 0.0, self.error
        if error > self.tolerance:
            left = max(abs(_log(actual) - _log(explained)), math.log1p(min(error, 1e300)))
        weights = {cause: abs(effect) for cause, effect in effects.items()}
        if weights and sum(weights.values()) <= 1e-12:  # the changes turn the gradient without changing its norm
            weights = dict.fromkeys(weights, 1.0)
        total = sum(weights.values()) + left
        causes = [
            Cause(id=cause, share=_part(weights[cause], total), factor=_exp(effects[cause]), detail=detail)
            for cause, detail in self.details.items()
        ]
        causes.sort(key=lambda cause: -cause.share)
        rest = Unexplained(
            share=_part(left, total),
            factor=actual / explained if explained > 0 else None,
            coef_error=error if math.isfinite(error) else None,
        )
        return causes, rest


def add_explanations(parts: Iterable[Explanation]) -> Explanation:
    """The explanation of all tokens together. A part that needed no such change is the same with and without it.

    Raises ``ValueError`` for no parts.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("no explanation to add up")
    details = {cause: text for part in reversed(parts) for cause, text in part.details.items()}
    order = sorted(details)
    squares = {
        frozenset(chosen): sum(part.squares[frozenset(c for c in chosen if c in part.details)] for part in parts)
        for size in range(len(order) + 1)
        for chosen in combinations(order, size)
    }
    return Explanation(
        {cause: details[cause] for cause in order},
        squares,
        sum(part.actual for part in parts),
        sum(part.left for part in parts),
        max(part.tolerance for part in parts),
    )


def shapley(items: Sequence[str], value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Shapley values of a set function, exactly (2^k evaluations)."""
    n = len(items)
    out = dict.fromkeys(items, 0.0)
    for item in items:
        rest = [i for i in items if i != item]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for chosen in combinations(rest, size):
                coalition = frozenset(chosen)
                out[item] += weight * (value(coalition | {item}) - value(coalition))
    return out


def _part(value: float, total: float) -> float:
    return value / total if total else 0.0


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _exp(value: float) -> float | None:
    return math.exp(value) if abs(value) < 200 else None
