"""What a rule is, and the arithmetic that rules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from driftscope.errors import UsageError
from driftscope.records import Severity, StepRecord

if TYPE_CHECKING:
    from driftscope.doctor.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a number becomes a finding. Ratios count in both directions.

    Raises ``UsageError`` for a value outside its domain.
    """

    gap_warning: float = 1.5
    """Ratio of gradient norms that is a warning."""
    gap_critical: float = 10.0
    """Ratio of gradient norms that is critical."""
    noise_multiple: float = 3.0
    """Relative differences below this multiple of the measured noise floor never count."""
    unexplained: float = 0.05
    """Share of a gap that may stay unexplained."""
    effect: float = 0.01
    """Relative change of the gradient from which a dropped term counts."""
    share: float = 0.05
    """Share of the gap from which a cause counts."""
    residual: float = 1e-4
    """Part of the live hidden gradient that may stay outside every token coefficient."""
    coef_error: float = 1e-4
    """Relative error of the reference's coefficients against the float64 oracle that is still rounding."""
    reported_norm: float = 0.01
    """Relative difference allowed between the trainer's reported gradient norm and the live path's."""
    ratio_low: float = 0.5
    """Mean importance sampling ratio below which the correction is suspect; 1 / ratio_low above."""
    ratio_critical: float = 0.1
    """Mean importance sampling ratio below which hardly anything is learnt."""
    ess: float = 0.3
    """Effective sample size, as a share, below which few samples carry the gradient."""
    kept_mass: float = 0.99
    """Kept probability mass per token below which truncated sampling is a warning."""
    all_masked: float = 0.999
    """Share of masked or capped ratios that counts as all."""
    straggler: float = 1.5
    """Own time of the slowest rank, as a multiple of the other ranks' median, that is a warning."""
    unmeasured_noise: float = 2.0**-8
    """Noise floor assumed where none was measured: the rounding of bfloat16."""

    def __post_init__(self) -> None:
        if not 1.0 < self.gap_warning <= self.gap_critical:
            raise UsageError(
                f"gap_warning={self.gap_warning!r} and gap_critical={self.gap_critical!r} are ratios of gradient "
                "norms; use 1 < gap_warning <= gap_critical."
            )

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Thresholds:
        """The thresholds among a run's settings; whatever is missing or no usable number keeps its default."""
        known = {f.name for f in fields(cls)}
        nested = settings.get("thresholds")
        merged = {**settings, **(nested if isinstance(nested, dict) else {})}
        chosen = {
            k: float(v)
            for k, v in merged.items()
            if k in known and isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
        }
        try:
            return cls(**chosen)
        except UsageError:
            return cls()


@dataclass(frozen=True)
class Finding:
    """What a rule found: how bad, in a line, with its measured numbers, and what to do."""

    severity: Severity
    title: str
    evidence: str
    remedy: str
    rule: str = ""
    """Code of the rule, filled in by whoever evaluates it."""


Check = Callable[[StepRecord, Thresholds], Finding | None]
Predict = Callable[["Facts", Thresholds], Finding | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One diagnostic. ``check`` judges one step of a run, ``predict`` the facts that the doctor measured before it.

    ``check`` is ``None`` for a rule whose source is the run, a note, or the doctor alone.
    """

    code: str
    name: str
    title: str
    group: str
    why: str
    condition: str
    remedy: str
    check: Check | None = None
    source: Literal["step", "run", "note", "doctor"] = "step"
    predict: Predict | None = None
    foreseen: str = ""
    """When ``predict`` fires; ``condition`` says it where the doctor is the only source."""


def finite(value: float | None) -> float | None:
    """The value, or ``None`` where it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def noise_floor(record: StepRecord, thresholds: Thresholds) -> float:
    """Relative noise below which no difference counts: ``noise_multiple`` times the measured noise floor."""
    measured = finite(record.gap.noise_floor) if record.gap is not None else None
    return thresholds.noise_multiple * (thresholds.unmeasured_noise if measured is None else measured)


def crossed(ratio: float, limit: float, noise: float) -> bool:
    """Whether |log ratio| exceeds both log(limit) and the noise; zero and infinity always do."""
    if math.isnan(ratio) or ratio < 0:
        return False
    size = abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf
    return size >= math.log(limit) * (1 - 1e-12) and size > noise


def is_shadow(record: StepRecord) -> bool:
    """Whether the gap's candidate is not what trains."""
    return record.gap is not None and record.gap.candidate != record.live


def hidden_ratio(record: StepRecord) -> float | None:
    """Gradient norm, candidate / reference: over the hidden states, else over the parameters; ``inf`` at a zero
    reference, ``None`` where it could not be had.
    """
    gap = record.gap
    if gap is None:
        return None
    for ratio in (gap.grad_norm_ratio, gap.param_grad_norm_ratio):
        if (known := finite(ratio)) is not None:
            return known
    sides = [record.paths.get(name) for name in (gap.candidate, gap.reference)]
    norms = [finite(side.hidden_grad_norm) if side is not None else None for side in sides]
    if norms[0] is None or norms[1] is None or norms == [0.0, 0.0]:
        return None
    return norms[0] / norms[1] if norms[1] > 0 else math.inf


def relative_distance(record: StepRecord) -> float | None:
    """|g_candidate - g_reference| / |g_reference| of the hidden gradients: sqrt(r^2 - 2 r cos + 1)."""
    gap = record.gap
    if gap is None:
        return None
    ratio, cosine = finite(gap.grad_norm_ratio), finite(gap.cosine)
    if ratio is not None and cosine is not None:
        return math.sqrt(max(ratio * ratio - 2 * ratio * cosine + 1, 0.0))
    candidate = record.paths.get(gap.candidate)
    return finite(candidate.coef_error) if candidate is not None else None
