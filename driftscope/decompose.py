"""The log importance sampling ratio taken apart: which known differences make it, and what is left as noise.

The log ratio of a token, d = log pi_trainer - log pi_engine, is a sum: each difference between the two (a truncated
support, another temperature, other weights) adds its own part, and the rest is noise. A part is a vector over the same
tokens, computed from the trainer's side alone; whether it is there is decided by how much of d it takes away.

Shares: part_k . d / d . d. They and the rest's share sum to 1 exactly; a part that cancels another's has a negative
share. Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftscope.records import Cause

NOISE = "engine_noise"
MIN_GAIN = 0.3
"""Share of the remaining sum of squares that a part must take away to count as present."""
ROUNDING = 3.0
"""Multiple of the noise floor under which what remains is not looked into any further."""


@dataclass(frozen=True)
class Part:
    """A difference that may be there: what it alone makes of the log ratio (N,)."""

    id: str
    log_ratio_N: Tensor
    detail: str = ""
    rivals: frozenset[str] = frozenset()
    """Ids that this part excludes once it is chosen: the engine has one set of weights."""


@dataclass(frozen=True)
class Decomposition:
    """The parts that are there, by their share, and the rest."""

    causes: tuple[Cause, ...]
    rest_N: Tensor
    rms: float
    """Root mean square of the log ratio."""
    rest_rms: float

    @property
    def first(self) -> str | None:
        """Id of the largest cause."""
        return self.causes[0].id if self.causes else None


def decompose(log_ratio_N: Tensor, parts: Sequence[Part], noise_floor: float) -> Decomposition:
    """Choose the parts one by one, the one that leaves least first, as long as one takes away ``MIN_GAIN``.

    log_ratio_N: (N,), finite. noise_floor: root mean square of the trainer's own rounding noise, in nats; a rest under
    ``ROUNDING`` times that is noise whatever it looks like. Returns causes ordered by share, the noise included.
    """
    total = log_ratio_N.double()
    rest, chosen = total, list[Part]()
    left = [p for p in parts if bool(torch.isfinite(p.log_ratio_N).all())]
    floor = (ROUNDING * noise_floor) ** 2
    while left and total.numel() and _mean_square(rest) > floor:
        # What is under the floor is equal: of two parts that explain everything, the one named first is chosen.
        best = min(left, key=lambda p: max(_mean_square(rest - p.log_ratio_N.double()), floor))
        after = rest - best.log_ratio_N.double()
        if _mean_square(after) > (1 - MIN_GAIN) * _mean_square(rest):
            break
        rest = after
        chosen.append(best)
        left = [p for p in left if p is not best and p.id not in best.rivals]
    size = float(total @ total)
    causes = [_cause(p.id, p.log_ratio_N.double(), total, size, p.detail) for p in chosen]
    causes.append(_cause(NOISE, rest, total, size, ""))
    causes.sort(key=lambda c: -abs(c.share))
    return Decomposition(tuple(causes), rest, _mean_square(total) ** 0.5, _mean_square(rest) ** 0.5)


def _mean_square(values: Tensor) -> float:
    return float(values.square().mean()) if values.numel() else 0.0


def _cause(name: str, part: Tensor, total: Tensor, size: float, detail: str) -> Cause:
    share = float(part @ total) / size if size > 0 else float(name == NOISE)
    factor = float(part.mean().exp()) if part.numel() else None
    return Cause(id=name, share=share, factor=factor, detail=detail or None)
