"""DS109: a difference that no known term explains."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.doctor.facts import Facts
from driftscope.records import Severity, StepRecord
from driftscope.rules._causes import OWN_PATH_REMEDY, find_cause, shadow_subject, subject
from driftscope.rules._stack import WHOLE, live_rows, severity_of, words
from driftscope.rules.base import (
    Finding,
    Rule,
    Thresholds,
    crossed,
    finite,
    hidden_ratio,
    is_shadow,
    noise_floor,
    relative_distance,
)

HEAD_CAUSES = ("logit_transform", "head_adapter")


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on an unexplained part of a significant gap, on extra terms, or on a residual of the live gradient."""
    noise = noise_floor(record, thresholds)
    residual = finite(record.residual)
    outside = residual is not None and residual > max(thresholds.residual, noise)
    explained_by_head = not is_shadow(record) and any(find_cause(record, cause) for cause in HEAD_CAUSES)
    if outside and not explained_by_head:
        share = f"{percent(residual)} of the live hidden gradient is outside every token coefficient"
        bound = f"residual {sig(residual)}, allowed {sig(max(thresholds.residual, noise), 2)}"
        title = f"The gradient that trains ({record.live}) holds a term that the configured loss does not have"
        return Finding("warning", title, f"{share} ({bound})", RULE.remedy)
    left = record.unexplained
    extra = find_cause(record, "extra_terms") is not None
    if record.gap is None or not (extra or (left is not None and left.share > thresholds.unexplained)):
        return None
    if not _significant(record, thresholds, noise):
        return None
    severity: Severity = "info" if is_shadow(record) else "warning"
    if is_shadow(record):
        title = f"{shadow_subject(record)} change the gradient in a way that no known term explains"
    else:
        title = f"{subject(record)} differs in a way that no known term explains"
    own = record.gap.candidate == "reference"
    return Finding(severity, title, _evidence(record), OWN_PATH_REMEDY if own else RULE.remedy)


def _significant(record: StepRecord, thresholds: Thresholds, noise: float) -> bool:
    """Whether the unexplained part is a gap, and not the rounding of two equal paths."""
    distance = relative_distance(record)
    if distance is not None and distance > max(thresholds.effect, noise):
        return True
    ratio = hidden_ratio(record)
    return ratio is not None and crossed(ratio, 1.0 + thresholds.effect, noise)


ALL_TOGETHER = (
    "Try the settings in pairs: run the doctor with one of them at its default at a time. If the live path is "
    "Liger's, set use_liger_kernel=False until it is clear."
)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the whole configuration is computed otherwise, and each of its terms as configured."""
    whole = [r for r in live_rows(facts, ("differs",)) if r.feature == WHOLE]
    others = [r for r in live_rows(facts, ("dropped", "differs")) if r.feature != WHOLE]
    if not whole or others:
        return None
    return Finding(
        severity_of(whole, thresholds),
        "Together, the settings make a loss that no single one explains",
        "; ".join(map(words, whole)) + "; every setting by itself is honoured, or could not be tried",
        ALL_TOGETHER,
    )


def _evidence(record: StepRecord) -> str:
    left, parts = record.unexplained, []
    if left is not None:
        parts.append(f"{percent(left.share)} of the gap of {sig(hidden_ratio(record))} is unexplained")
        if left.factor is not None:
            parts.append(f"factor {sig(left.factor)}")
        if left.coef_error is not None:
            parts.append(f"coefficients off by {percent(left.coef_error)} from the best explanation")
    cause = find_cause(record, "extra_terms")
    if cause is not None:
        parts.append(f"extra terms: share {percent(cause.share)}" + (f", {cause.detail}" if cause.detail else ""))
    return "; ".join(parts)


RULE = Rule(
    code="DS109",
    name="unexplained-difference",
    title="A difference that no known term explains",
    group="loss paths",
    why=(
        "Driftscope explains a gap by swapping the terms that it knows. What is left is reported as unexplained and "
        "never added to a known cause. A large residual - the part of the hidden gradient that is not a token "
        "coefficient times dlogp/dh - points to a further loss term on the hidden states or to another output head; "
        "an unexplained share points to a custom loss, a patched kernel, or a term of a TRL version not yet known."
    ),
    condition=(
        "unexplained.share > 5% while the gradients differ by more than 1% and the noise, or residual > max(1e-4, "
        "noise_multiple (3) times the noise floor) where no head cause (DS107, DS108) explains it. Info at most for a "
        "path that does not train; the residual is always of what trains."
    ),
    remedy=(
        "Look for what changes the loss outside GRPOConfig: an overridden compute_loss, a callback or hook on the "
        "hidden states, a patched Liger function, an auxiliary loss; remove it or run once without it. If nothing of "
        "the sort is there, report the run's records."
    ),
    check=check,
    predict=predict,
    foreseen=(
        "The stack probe ran the path that is to train with all loss settings of the configuration at once, on a "
        "small synthetic batch: its gradient is off by more than 0.1%, and each setting by itself is honoured. "
        "Critical if the norm is off by gap_critical (10) or more, else warning."
    ),
)
