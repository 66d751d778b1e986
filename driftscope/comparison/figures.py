"""The figures that runs are compared by: how each is read, and which difference is too small to count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from driftscope.records import StepRecord
from driftscope.rules._ratios import applied_mean
from driftscope.rules.base import Thresholds, finite, hidden_ratio

Getter = Callable[[StepRecord], float | None]
_LIMITS = Thresholds()
EFFECT = math.log1p(_LIMITS.effect)
CAUSE_PREFIX = "cause."


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One compared figure.

    scale: differences are ratios (``log``) or plain (``linear``). floor: the smallest difference that counts, a log
    ratio or in the figure's unit. lowest: smaller values are all the same to it (rounding). ideal: the value that an
    honest run has; without one a difference is neither better nor worse.
    """

    id: str
    label: str
    unit: Literal["x", "", "nats", "share", "ms", "steps", "processes", "records"] = ""
    scale: Literal["log", "linear"] = "log"
    floor: float = EFFECT
    lowest: float = 1e-12
    ideal: float | None = None
    judged: bool = True
    of_pair: bool = False
    """Whether it compares the gap's two paths, so that runs which compare other paths cannot be set against each
    other."""
    get: Getter | None = None
    """``None`` for a figure of the run as a whole."""

    def on_scale(self, value: float) -> float:
        """The value where differences are taken: its log, or itself."""
        return math.log(max(value, self.lowest)) if self.scale == "log" else value

    def off_scale(self, difference: float) -> float:
        """A difference as it is shown: a factor on a logarithmic scale."""
        return math.exp(min(difference, 700.0)) if self.scale == "log" else difference


def _live_error(record: StepRecord) -> float | None:
    path = record.paths.get(record.live)
    return path.coef_error if path is not None else None


def _live_norm(record: StepRecord) -> float | None:
    path = record.paths.get(record.live)
    return path.hidden_grad_norm if path is not None else None


FIGURES: tuple[Figure, ...] = (
    Figure(id="steps", label="Last step on record", unit="steps", judged=False),
    Figure(id="records", label="Micro-batches on record", unit="records", judged=False),
    Figure(id="processes", label="Processes", unit="processes", judged=False),
    Figure(
        id="gap", label="Gap in gradient norm, median", unit="x", ideal=1.0, of_pair=True,
        get=lambda s: r if (r := hidden_ratio(s)) is not None and r >= 0 else None,
    ),
    Figure(id="worst_gap", label="Gap in gradient norm, furthest from 1", unit="x", judged=False, of_pair=True),
    Figure(
        id="param_gap", label="Gap over all parameters (deep steps)", unit="x", ideal=1.0, of_pair=True,
        get=lambda s: s.gap.param_grad_norm_ratio if s.gap is not None else None,
    ),
    Figure(
        id="cosine", label="Cosine of the two gradients", scale="linear", floor=0.01, ideal=1.0, of_pair=True,
        get=lambda s: s.gap.cosine if s.gap is not None else None,
    ),
    Figure(
        id="unexplained", label="Unexplained share of the gap", unit="share", scale="linear",
        floor=_LIMITS.unexplained, ideal=0.0, of_pair=True,
        get=lambda s: s.unexplained.share if s.unexplained is not None else None,
    ),
    Figure(
        id="coef_error", label="Coefficient error of the path that trains", lowest=_LIMITS.coef_error, ideal=0.0,
        get=_live_error,
    ),
    Figure(
        id="residual", label="Residual of the live gradient", lowest=_LIMITS.residual, ideal=0.0,
        get=lambda s: s.residual,
    ),
    Figure(id="live_grad_norm", label="Gradient norm reported by the trainer", get=lambda s: s.live_grad_norm),
    Figure(id="hidden_grad_norm", label="Hidden gradient norm of the path that trains", get=_live_norm),
    Figure(
        id="is_ratio", label="Importance sampling ratio, mean as applied", ideal=1.0,
        get=lambda s: applied_mean(s.is_ratio) if s.is_ratio is not None else None,
    ),
    Figure(
        id="kept_mass", label="Kept probability mass a token", scale="linear", floor=1 - _LIMITS.kept_mass, ideal=1.0,
        get=lambda s: s.is_ratio.kept_mass if s.is_ratio is not None else None,
    ),
    Figure(
        id="k1", label="Mismatch of trainer and engine, k1", unit="nats", scale="linear", floor=1e-4, ideal=0.0,
        get=lambda s: s.mismatch.divergence.k1 if s.mismatch is not None else None,
    ),
    Figure(
        id="k3", label="Mismatch of trainer and engine, k3", unit="nats", lowest=1e-6, ideal=0.0,
        get=lambda s: s.mismatch.divergence.k3 if s.mismatch is not None else None,
    ),
    Figure(id="step_ms", label="Time of a micro-batch's step", unit="ms", judged=False, get=lambda s: s.step_ms),
    Figure(id="overhead", label="Driftscope's cost, of step time on analysed steps", unit="share", judged=False),
    Figure(id="spent", label="Driftscope's cost, of the run's step time", unit="share", judged=False),
)  # fmt: skip
DRAWN = ("gap", "live_grad_norm", "is_ratio")


def cause_figure(cause: str) -> Figure:
    """The factor that one cause of the gap puts on the gradient norm; 1 where it was sought and is not among them."""
    return Figure(
        id=CAUSE_PREFIX + cause,
        label=f"Factor of the cause {cause}",
        unit="x",
        ideal=1.0,
        of_pair=True,
        get=lambda s: cause_factor(s, cause),
    )


def cause_factor(record: StepRecord, cause: str) -> float | None:
    """The factor of that cause at a record, 1 where attribution did not name it, ``None`` where it did not run."""
    found = next((c for c in record.causes if c.id == cause), None)
    if found is not None:
        factor = finite(found.factor)
        return factor if factor is not None and factor >= 0 else None
    return 1.0 if attributed(record) else None


def attributed(record: StepRecord) -> bool:
    """Whether the causes of the gap were sought at a record."""
    return bool(record.causes) or (record.gap is not None and record.unexplained is not None)
