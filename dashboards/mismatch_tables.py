"""The tables on sampling drift: what the canary saw, and every figure of the mismatch with the names others use."""

from __future__ import annotations

from collections.abc import Sequence

from driftscope.dashboards.figures.canary import STYLES
from driftscope.dashboards.series import finite, getter, middle, whole_of
from driftscope.dashboards.tables import Table
from driftscope.dashboards.wording import UNAVAILABLE, clean, count, number, percent, step_span, weights_label
from driftscope.mismatch.formulas import FORMULAS
from driftscope.mismatch.model import Mismatch
from driftscope.reading.events import Limits
from driftscope.records import CanaryRecord, StepRecord, ViolationRecord

SHOWN_LOOKS = 8
FRAMEWORKS = {"trl": "TRL", "verl": "verl", "nemo-rl": "NeMo-RL", "miles": "miles"}
_WEIGHTS = ("mean", "std", "min", "max", "ess", "chi2", "share_outside", "share_over_cap", "share_zero", "clamped")
FIGURES = (
    *(f"raw.token.{s}" for s in (*_WEIGHTS[:7], "quantiles.p05", "quantiles.p95")),
    *(f"raw.geometric.{s}" for s in ("mean", "min", "max")),
    *(f"raw.product.{s}" for s in ("mean", "std", "min", "max", "ess", "chi2", "share_over_cap", "clamped")),
    *(f"applied.token.{s}" for s in ("mean", "std", "min", "max", "ess", "share_over_cap", "share_zero")),
    *(f"applied.product.{s}" for s in ("mean", "std", "min", "max", "ess", "share_over_cap", "share_zero")),
    "log_difference.mean", "log_difference.abs_mean", "log_difference.std", "log_difference.abs_max",
    "log_difference.mult_prob_error", "log_difference.abs_quantiles.p50", "log_difference.abs_quantiles.p99",
    "divergence.k1", "divergence.k3", "divergence.k1_reverse", "divergence.k3_reverse", "divergence.js",
    "perplexity.trainer", "perplexity.engine", "perplexity.ratio", "perplexity.log_diff", "perplexity.log_abs_diff",
    "probability.correlation", "probability.abs_diff_mean", "probability.abs_diff_max",
    "tokens", "sequences", "mean_length", "unscored", "nonfinite", "incomplete",
)  # fmt: skip
_ONLY_IF_ANY = frozenset({"unscored", "nonfinite", "incomplete", "raw.product.clamped"})


def figure_table(steps: Sequence[StepRecord]) -> Table | None:
    """The mismatch in the field's own figures: medians over the micro-batches, and the latest."""
    known = [s for s in steps if s.mismatch is not None]
    if not known or (last := known[-1].mismatch) is None:
        return None
    whole = whole_of(steps)
    records = len(known) if whole is None else whole.whole.mismatches
    rows = []
    for figure in FIGURES:
        if figure.startswith("applied.") and not _applied(figure, last):
            continue
        value = middle(steps, getter(f"mismatch.{figure}"))
        latest = finite(last.get(figure))
        if figure in _ONLY_IF_ANY and not value and not latest:
            continue
        formula = FORMULAS[figure]
        unit = "" if formula.unit == "1" else formula.unit
        names = [f"{text}: {', '.join(formula.names[k])}" for k, text in FRAMEWORKS.items() if k in formula.names]
        meaning = formula.formula.partition("; ")[0] if "quantiles" in figure else formula.formula
        rows.append(
            [figure, _value(value, unit), _value(latest, unit), unit, "; ".join(names) or UNAVAILABLE, meaning]
        )
    caption = (
        f"The mismatch in figures: medians over {count(records, 'micro-batch', 'micro-batches')}, and the last "
        f"(step {known[-1].step}); d = log p of the trainer minus log p of the engine, w = exp(d)"
    )
    columns = ["Figure", "Median", "Last", "Unit", "Logged elsewhere as", "Formula"]
    return Table(caption, columns, rows, {1, 2})


def limit_table(steps: Sequence[StepRecord]) -> Table | None:
    """The limits of the threshold profile that the mismatch crossed: how often, and the furthest value."""
    whole = whole_of(steps)
    limits = Limits() if whole is None else whole.whole.limits
    if whole is None:
        for record in steps:
            limits.add({"step": record.step, "violations": [v.model_dump() for v in record.violations]})
    if not limits.rows:
        return None
    measured = sum(s.mismatch is not None for s in steps) if whole is None else whole.whole.mismatches
    rows = []
    for limit, seen in limits.rows.items():
        worst = ViolationRecord.model_validate(seen.worst)
        cells = [number(v, 4) for v in (worst.value, worst.allowed, worst.nominal)]
        when = step_span((seen.first, seen.last))
        rows.append([clean(limit), clean(worst.figure), *cells, f"{seen.seen:,}", when, clean(worst.source)])
    columns = ["Limit", "Figure", "Furthest", "Allowed", "Profile's limit", "Times", "When", "Source"]
    caption = (
        f"Limits of the threshold profile that were crossed, in {count(measured, 'micro-batch', 'micro-batches')}"
    )
    return Table(caption, columns, rows, {2, 3, 4, 5})


def _applied(figure: str, mismatch: Mismatch) -> bool:
    """Whether the figure is of the level at which the loss applies the ratio."""
    level = {"token": "token", "sequence": "product"}.get(mismatch.applied_level or "")
    return mismatch.applied is not None and figure.split(".")[1] == level


def _value(value: float | None, unit: str) -> str:
    return percent(value) if unit == "share" else number(value, 4)


def canary_table(steps: Sequence[StepRecord]) -> Table | None:
    """The looks of the canary: those at which its answer changed, and the last ones."""
    looks = [(s, s.canary) for s in steps if s.canary is not None]
    if not looks:
        return None
    chosen = _chosen([c for _, c in looks])
    weights = [n for n in STYLES if any(n in c.distances for _, c in looks)]
    coarse = any(c.bf16_noise is not None for _, c in looks)
    rows = [
        [
            f"{s.step:,}",
            _agreement(c),
            *(number(finite(c.distances.get(n))) for n in weights),
            number(finite(c.rms)),
            number(finite(c.rest_rms)),
            number(finite(c.noise_floor)),
            *([number(finite(c.bf16_noise))] if coarse else []),
            f"{c.tokens:,}",
            _remark(c),
        ]
        for s, c in (looks[i] for i in chosen)
    ]
    columns = [
        "Step", "Engine agrees with", *(f"To {weights_label(n)}" for n in weights), "Log ratio", "Unexplained",
        "Noise floor", *(["bfloat16 noise"] if coarse else []), "Tokens", "Remark",
    ]  # fmt: skip
    whole = whole_of(steps)
    total = len(looks) if whole is None else whole.whole.engine.looks
    left = f"; {len(chosen)} of {count(total, 'look')}" if len(chosen) < total else ""
    caption = f"What the canary saw: nats a token (root mean square){left}"
    return Table(caption, columns, rows, {0, *range(2, len(columns) - 1)})


def _chosen(looks: Sequence[CanaryRecord]) -> list[int]:
    """Indices of the first and last looks and of those around a change of the answer, at most ``SHOWN_LOOKS``."""
    n = len(looks)
    if n <= SHOWN_LOOKS:
        return list(range(n))
    keys = [(c.agrees_with, tuple(c.stale_modules)) for c in looks]
    changes = [i for i in range(1, n) if keys[i] != keys[i - 1]][: SHOWN_LOOKS // 4]
    keep = {0, *(j for i in changes for j in (i - 1, i))}
    for i in range(n - 1, -1, -1):
        if len(keep) >= SHOWN_LOOKS:
            break
        keep.add(i)
    return sorted(keep)


def _agreement(look: CanaryRecord) -> str:
    text = weights_label(look.agrees_with)
    if look.agrees_with == "previous" and look.snapshot_step is not None:
        return f"{text} (step {look.snapshot_step})"
    return text


def _remark(look: CanaryRecord) -> str:
    parts = ["old: " + ", ".join(clean(n) for n in look.stale_modules)] if look.stale_modules else []
    if look.tokenizer:
        parts.append("tokenizer: " + ", ".join(clean(t) for t in look.tokenizer))
    if look.note:
        parts.append(clean(look.note))
    return "; ".join(parts)
