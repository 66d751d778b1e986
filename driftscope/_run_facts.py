"""A run in a few medians: what the verdict talks about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from driftscope._journal_reader import Run
from driftscope._verdict_engine import Engine, gather_engine
from driftscope.records import StepRecord
from driftscope.rules._ratios import applied_mean
from driftscope.rules.base import finite, hidden_ratio


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Medians over the analysed micro-batches; ``None`` is unavailable.

    gap: gradient norm, candidate / reference. worst_gap: the one furthest from 1. causes: id -> (median share, median
    factor), largest share first. length: completion tokens of a sequence that are trained on.
    """

    records: int
    first_step: int
    last_step: int
    live: str
    live_head: str | None
    candidate: str | None
    reference: str | None
    gap: float | None
    worst_gap: float | None
    param_gap: float | None
    cosine: float | None
    norms: dict[str, float] = field(default_factory=dict)
    coef_errors: dict[str, float] = field(default_factory=dict)
    causes: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    unexplained: float | None = None
    residual: float | None = None
    ratio_mode: str | None = None
    ratio_level: str | None = None
    ratio_mean: float | None = None
    ratio_applied: bool = False
    kept_mass: float | None = None
    length: float | None = None
    engine: Engine | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def shadow(self) -> bool:
        """Whether the candidate is not what trains."""
        return self.candidate is not None and self.candidate != self.live


def measured(run: Run) -> list[StepRecord]:
    """The records in which at least one path's gradient, or the residual of the live one, was measured."""
    return [
        s
        for s in run.steps
        if s.tier != "light"
        and (finite(s.residual) is not None or any(finite(p.hidden_grad_norm) is not None for p in s.paths.values()))
    ]


def gather(run: Run) -> Facts | None:
    """The facts of a run, or ``None`` where nothing was measured."""
    steps = measured(run)
    if not steps:
        return None
    sides = Counter((s.gap.candidate, s.gap.reference) for s in steps if s.gap is not None)
    candidate, reference = sides.most_common(1)[0][0] if sides else (None, None)
    compared = [s for s in steps if s.gap is not None and (s.gap.candidate, s.gap.reference) == (candidate, reference)]
    gaps = [r for s in compared if (r := hidden_ratio(s)) is not None and r >= 0]
    names = sorted({name for s in steps for name in s.paths})
    ratios = [s.is_ratio for s in steps if s.is_ratio is not None]
    stats = [r.applied or r.raw for r in ratios]
    return Facts(
        records=len(steps),
        first_step=min(s.step for s in steps),
        last_step=max(s.step for s in steps),
        live=Counter(s.live for s in steps).most_common(1)[0][0],
        live_head=next((s.live_head for s in reversed(steps) if s.live_head), None),
        candidate=candidate,
        reference=reference,
        gap=median(gaps) if gaps else None,
        worst_gap=max(gaps, key=lambda r: abs(math.log(r)) if 0 < r < math.inf else math.inf) if gaps else None,
        param_gap=middle(compared, lambda s: s.gap.param_grad_norm_ratio if s.gap else None),
        cosine=middle(compared, lambda s: s.gap.cosine if s.gap else None),
        norms=_of_paths(steps, names, "hidden_grad_norm"),
        coef_errors=_of_paths(steps, names, "coef_error"),
        causes=_causes([s for s in compared if hidden_ratio(s) is not None]),
        unexplained=middle(compared, lambda s: s.unexplained.share if s.unexplained else None),
        residual=middle(steps, lambda s: s.residual),
        ratio_mode=next((r.mode for r in ratios if r.mode), None),
        ratio_level=next((s.level for s in stats if s is not None), None),
        ratio_mean=middle(steps, lambda s: applied_mean(s.is_ratio) if s.is_ratio else None),
        ratio_applied=any(r.applied is not None for r in ratios),
        kept_mass=middle(steps, lambda s: s.is_ratio.kept_mass if s.is_ratio else None),
        length=middle(steps, _length),
        engine=gather_engine(steps),
        unavailable={name: why for s in steps for name, why in s.unavailable.items()},
    )


def middle(steps: Iterable[StepRecord], get: Callable[[StepRecord], float | None]) -> float | None:
    """Median of what is there and finite."""
    known = [v for s in steps if (v := finite(get(s))) is not None]
    return median(known) if known else None


def _of_paths(steps: list[StepRecord], names: list[str], field_name: str) -> dict[str, float]:
    out = {}
    for name in names:
        known = [v for s in steps if name in s.paths and (v := finite(getattr(s.paths[name], field_name))) is not None]
        if known:
            out[name] = median(known)
    return out


def _causes(steps: list[StepRecord]) -> dict[str, tuple[float, float | None]]:
    """Median share (zero where a record does not name the cause) and median factor, largest share first."""
    out = {}
    for cause_id in {c.id for s in steps for c in s.causes}:
        found = [next((c for c in s.causes if c.id == cause_id), None) for s in steps]
        factors = [f for c in found if c is not None and (f := finite(c.factor)) is not None]
        out[cause_id] = (
            median(c.share if c is not None else 0.0 for c in found),
            median(factors) if factors else None,
        )
    return dict(sorted(out.items(), key=lambda item: (-item[1][0], item[0])))


def _length(record: StepRecord) -> float | None:
    stats = record.is_ratio.raw or record.is_ratio.applied if record.is_ratio is not None else None
    if stats is None or stats.level != "sequence" or not stats.count or record.tokens is None:
        return None
    return record.tokens / stats.count
