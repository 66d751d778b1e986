"""What a mismatch looks like to a reader: figures as JSON. A figure that cannot be had is ``None``.

d = trainer log-prob - engine log-prob of a sampled token, w = exp(d). Formulas, units and the names that others use
are in ``driftscope.mismatch.FORMULAS``, keyed by the path of the field (``raw.token.mean``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", protected_namespaces=())


class WeightFigures(_Model):
    """Distribution of one kind of weight: a ratio by token, its geometric mean or its product by sequence."""

    count: int = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    ess: float | None = None
    chi2: float | None = None
    log_mean: float | None = None
    log_std: float | None = None
    share_outside: float | None = None
    share_over_cap: float | None = None
    share_under_floor: float | None = None
    share_zero: float | None = None
    clamped: int = Field(0, description="weights whose |log| was over 300: mean, std and chi2 took them as exp(+-300)")
    quantiles: dict[str, float] = Field(default_factory=dict, description="p01 p05 p25 p50 p75 p95 p99, from bins")


class Levels(_Model):
    """One ratio at its three levels."""

    token: WeightFigures = Field(default_factory=WeightFigures)
    geometric: WeightFigures = Field(default_factory=WeightFigures)
    product: WeightFigures = Field(default_factory=WeightFigures)


class LogDifference(_Model):
    """d of the tokens."""

    mean: float | None = None
    abs_mean: float | None = None
    std: float | None = None
    abs_max: float | None = None
    mult_prob_error: float | None = None
    quantiles: dict[str, float] = Field(default_factory=dict)
    abs_quantiles: dict[str, float] = Field(default_factory=dict)


class Divergences(_Model):
    """KL, Jensen-Shannon and chi-squared estimates on the sampled tokens."""

    k1: float | None = None
    k3: float | None = None
    k1_reverse: float | None = None
    k3_reverse: float | None = None
    js: float | None = None
    chi2_token: float | None = None
    chi2_sequence: float | None = None


class Perplexity(_Model):
    """Perplexities of both policies on the sampled sequences."""

    trainer: float | None = None
    engine: float | None = None
    ratio: float | None = None
    log_trainer: float | None = None
    log_engine: float | None = None
    log_diff: float | None = None
    log_abs_diff: float | None = None
    log_diff_max: float | None = None
    log_diff_min: float | None = None


class Probability(_Model):
    """Probabilities of the sampled tokens under both policies."""

    correlation: float | None = None
    abs_diff_mean: float | None = None
    abs_diff_max: float | None = None
    abs_diff_std: float | None = None


class Bin(_Model):
    """d of the tokens in [low, high)."""

    low: float
    high: float | None = Field(None, description="None: open")
    count: int = 0
    mean: float | None = None
    abs_mean: float | None = None
    std: float | None = None


class HistogramBin(_Model):
    """Number of tokens whose d is in (low, high]; None: open."""

    low: float | None
    high: float | None
    count: int


class Mismatch(_Model):
    """How far trainer and engine are apart on the tokens of one batch, or of several merged."""

    tokens: int = 0
    sequences: int = 0
    unscored: int = 0
    nonfinite: int = 0
    incomplete: int = 0
    mean_length: float | None = None
    cap: float | None = None
    floor: float | None = None
    applied_level: str | None = None
    raw: Levels = Field(default_factory=Levels)
    applied: Levels | None = None
    log_difference: LogDifference = Field(default_factory=LogDifference)
    divergence: Divergences = Field(default_factory=Divergences)
    perplexity: Perplexity = Field(default_factory=Perplexity)
    probability: Probability = Field(default_factory=Probability)
    share_outside: float | None = None
    by_probability: list[Bin] = Field(default_factory=list)
    by_decile: list[Bin] = Field(default_factory=list)
    by_octave: list[Bin] = Field(default_factory=list)
    histogram: list[HistogramBin] = Field(default_factory=list)

    def get(self, figure: str) -> float | None:
        """The figure of that id (a key of ``FORMULAS``), ``None`` where it could not be had.

        Raises ``KeyError`` for an id that names no figure.
        """
        value: Any = self
        for part in figure.split("."):
            if value is None:
                return None
            if isinstance(value, dict):
                value = value.get(part)
            elif part in type(value).model_fields:
                value = getattr(value, part)
            else:
                raise KeyError(figure)
        if isinstance(value, int | float):
            return float(value)
        if value is None:
            return None
        raise KeyError(figure)

    def flat(self) -> dict[str, float]:
        """Every number that there is, by figure id, without bins and histogram: what goes to a tracker."""
        return dict(_numbers(self.model_dump(exclude={"by_probability", "by_decile", "by_octave", "histogram"}), ""))


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float):
        yield path, float(value)
