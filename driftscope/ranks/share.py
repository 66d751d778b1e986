"""One rank's share of a micro-batch, as a row of numbers that travels in the step's collective.

The row holds what a record of the whole micro-batch needs of every rank: squared norms and products (they add up),
counts, extrema and the ledger. What is unavailable is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from driftscope.explanation import Explanation
from driftscope.is_ratio import KeptMass
from driftscope.mismatch import MismatchSums
from driftscope.records import CauseId, PathName, RatioStats, StepRecord

PATHS: tuple[str, ...] = get_args(PathName)
CAUSES: tuple[str, ...] = get_args(CauseId)
MOST_CAUSES = 4
"""Causes of one gap that a row has room for; a rank with more is left out of the merged causes."""
KNOTS = ("p01", "p05", "p25", "p50", "p75", "p95", "p99")

_SCALARS = (
    "present",
    "tokens",
    "completion_tokens",
    "zero_advantage_share",
    "sequences",
    "nonfinite",
    "candidate",
    "reference",
    "cosine",
    "noise_floor",
    "residual",
    "step_ms",
    "overhead_ms",
    "has_kept",
    "kept_count",
    "kept",
    "log_kept",
    "log_ratio",
)
_PATH = ("loss", "hidden_grad_norm", "coef_error", "normalizer", "normalizer_measured", "fused_call_error")
_RATIO = ("count", "mean", "std", "min", "max", "share_capped", "share_masked", *KNOTS)
RATIOS = ("raw", "raw_token", "applied")
_EXPLAINED = ("causes", "actual", "left", "tolerance", *(f"square{i}" for i in range(2**MOST_CAUSES)))

FIELDS: tuple[str, ...] = (
    *_SCALARS,
    *(f"{path}.{name}" for path in PATHS for name in _PATH),
    *(f"{ratio}.{name}" for ratio in RATIOS for name in _RATIO),
    *_EXPLAINED,
)
"""What each number of a row is."""


@dataclass
class Local:
    """What a rank measured of one micro-batch beside its record."""

    explanation: Explanation | None = None
    kept: KeptMass | None = None
    sequences: int | None = None
    mismatch: MismatchSums | None = None


def row_of(record: StepRecord, local: Local) -> list[float]:
    """The row of one rank's record, in the order of ``FIELDS``."""
    out: dict[str, float | None] = {
        "present": 1.0,
        "tokens": record.tokens,
        "completion_tokens": record.completion_tokens,
        "zero_advantage_share": record.zero_advantage_share,
        "sequences": local.sequences,
        "nonfinite": len(record.nonfinite),
        "residual": record.residual,
        "step_ms": record.step_ms,
        "overhead_ms": record.overhead_ms,
    }
    if record.gap is not None:
        out["candidate"] = PATHS.index(record.gap.candidate)
        out["reference"] = PATHS.index(record.gap.reference)
        out["cosine"], out["noise_floor"] = record.gap.cosine, record.gap.noise_floor
    for path, values in record.paths.items():
        for name in _PATH:
            out[f"{path}.{name}"] = getattr(values, name)
    if record.is_ratio is not None:
        for ratio in RATIOS:
            out |= _ratio_row(ratio, getattr(record.is_ratio, ratio))
    if local.kept is not None:
        out |= {"has_kept": 1.0, "kept_count": local.kept.count, "kept": local.kept.kept}
        out |= {"log_kept": local.kept.log_kept, "log_ratio": local.kept.log_ratio}
    if local.explanation is not None:
        out |= _explained_row(local.explanation)
    return [math.nan if (value := out.get(name)) is None else float(value) for name in FIELDS]


def empty_row() -> list[float]:
    """The row of a rank that has nothing to say of a micro-batch."""
    return [0.0 if name == "present" else math.nan for name in FIELDS]


@dataclass(frozen=True)
class Share:
    """A row with names. ``rank``: whose it is."""

    rank: int
    values: dict[str, float]

    @classmethod
    def read(cls, rank: int, row: Sequence[float]) -> Share:
        """Raises ``ValueError`` for a row of another length."""
        return cls(rank, dict(zip(FIELDS, row, strict=True)))

    def get(self, name: str) -> float | None:
        """The number of this name, ``None`` where it is unavailable or not finite."""
        value = self.values[name]
        return value if math.isfinite(value) else None

    @property
    def present(self) -> bool:
        """Whether the rank analysed this micro-batch."""
        return self.values["present"] == 1.0

    def path(self, path: str, name: str) -> float | None:
        """A number of one path."""
        return self.get(f"{path}.{name}")

    @property
    def gap(self) -> tuple[str, str] | None:
        """Names of the two paths that the rank compared."""
        a, b = self.get("candidate"), self.get("reference")
        return (PATHS[int(a)], PATHS[int(b)]) if a is not None and b is not None else None

    def ratio(self, ratio: str) -> dict[str, float] | None:
        """Figures of a ratio's distribution on this rank, or ``None`` without one."""
        if not self.get(f"{ratio}.count"):
            return None
        return {name: self.values[f"{ratio}.{name}"] for name in _RATIO}

    @property
    def kept(self) -> KeptMass | None:
        """Sums of the kept mass on this rank."""
        if self.get("has_kept") is None:
            return None
        return KeptMass(*(self.values[name] for name in ("kept_count", "kept", "log_kept", "log_ratio")))

    def explanation(self) -> Explanation | None:
        """The rank's explanation of its gap, details left out."""
        mask = self.get("causes")
        if mask is None:
            return None
        chosen = [cause for i, cause in enumerate(CAUSES) if int(mask) >> i & 1]
        squares = {part: self.values[f"square{i}"] for i, part in enumerate(_subsets(chosen))}
        return Explanation(
            dict.fromkeys(chosen, ""),
            squares,
            self.values["actual"],
            self.values["left"],
            self.values["tolerance"],
        )


def _ratio_row(ratio: str, stats: RatioStats | None) -> dict[str, float | None]:
    if stats is None:
        return {}
    plain = {name: getattr(stats, name) for name in _RATIO if name not in KNOTS}
    return {f"{ratio}.{name}": value for name, value in (plain | stats.quantiles).items()}


def _explained_row(found: Explanation) -> dict[str, float | None]:
    chosen = sorted(found.details, key=CAUSES.index)
    if len(chosen) > MOST_CAUSES:
        return {}
    out: dict[str, float | None] = {
        "causes": float(sum(1 << CAUSES.index(cause) for cause in chosen)),
        "actual": found.actual,
        "left": found.left,
        "tolerance": found.tolerance,
    }
    return out | {f"square{i}": found.squares[part] for i, part in enumerate(_subsets(chosen))}


def _subsets(chosen: Sequence[str]) -> list[frozenset[str]]:
    """All subsets, in the order of their bits."""
    return [frozenset(c for i, c in enumerate(chosen) if bits >> i & 1) for bits in range(2 ** len(chosen))]
