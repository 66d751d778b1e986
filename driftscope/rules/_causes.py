"""How a cause of the gap becomes a finding: the part that the rules DS102 to DS108 share."""

from __future__ import annotations

import math

from driftscope._text import path_words, percent, sentence, sig
from driftscope.records import Cause, Severity, StepRecord
from driftscope.rules._ratios import support_severity
from driftscope.rules.base import (
    Finding,
    Thresholds,
    crossed,
    finite,
    hidden_ratio,
    is_shadow,
    noise_floor,
    relative_distance,
)

OWN_PATH_REMEDY = (
    "This difference is in TRL's own path, so switching paths does not help: compare the setting with the release "
    "notes of the installed TRL, and report the record to TRL."
)
RATIO_FIRST = (
    "First make the importance sampling ratio honest (DS201: top_p=1.0, top_k=0, min_p=None): TRL's own path applies "
    "it and would hardly learn. Then: "
)


def find_cause(record: StepRecord, cause_id: str) -> Cause | None:
    """The record's cause of that id."""
    return next((c for c in record.causes if c.id == cause_id), None)


def severity_of(cause: Cause, record: StepRecord, thresholds: Thresholds) -> Severity | None:
    """How bad a cause is; ``None`` for a shadow's cause that changes nothing here."""
    noise = noise_floor(record, thresholds)
    factor = _factor(cause, record)
    distance = relative_distance(record)
    counts = cause.share >= thresholds.share
    turned = counts and distance is not None and distance > max(thresholds.effect, noise)
    moved = counts and (factor is None or abs(_log(factor)) > math.log1p(thresholds.effect) + noise)
    large = factor is not None and crossed(factor, thresholds.gap_warning, noise)
    if is_shadow(record):
        return "info" if turned or moved or large else None
    if factor is not None and crossed(factor, thresholds.gap_critical, noise):
        return "critical"
    return "warning" if turned or moved or large else "info"


def cause_finding(
    record: StepRecord, thresholds: Thresholds, cause_id: str, *, does: str, would: str, remedy: str, extra: str = ""
) -> Finding | None:
    """The finding of one cause, or ``None`` where the record does not name it.

    does, would: what the path does, as ``drops ...`` and ``drop ...``. extra: further measured evidence.
    """
    cause = find_cause(record, cause_id)
    if cause is None or record.gap is None:
        return None
    severity = severity_of(cause, record, thresholds)
    if severity is None:
        return None
    title = f"{shadow_subject(record)} {would}" if is_shadow(record) else f"{subject(record)} {does}"
    if record.gap.candidate == "reference":
        remedy = OWN_PATH_REMEDY
    elif support_severity(record, thresholds) in ("warning", "critical"):
        remedy = honest_ratio_first(remedy)
    return Finding(severity, title, "; ".join(filter(None, [evidence(cause, record), extra])), remedy)


def honest_ratio_first(remedy: str) -> str:
    """A remedy that may end in leaving the fused path, after the advice that makes that path's ratio honest."""
    if remedy.startswith(RATIO_FIRST) or "use_liger_kernel=False" not in remedy:
        return remedy
    return RATIO_FIRST + remedy


def subject(record: StepRecord) -> str:
    """The candidate as the subject of a sentence."""
    return sentence(path_words(record.gap.candidate)) if record.gap is not None else "The live path"


def shadow_subject(record: StepRecord) -> str:
    """A candidate that does not train as the subject of a sentence: what switching to it would do."""
    candidate = record.gap.candidate if record.gap is not None else ""
    if candidate != "liger":
        return f"Switching to {path_words(candidate)} would"
    return "Liger's own loss would" if record.live_head == "fused" else "Switching use_liger_kernel on would"


def evidence(cause: Cause, record: StepRecord) -> str:
    """The numbers of a cause in words."""
    assert record.gap is not None
    gap = f"{record.gap.candidate} / {record.gap.reference}"
    parts = []
    factor = finite(cause.factor)
    if factor is not None:
        parts.append(f"by itself it multiplies the hidden gradient norm by {sig(factor)}")
    ratio = hidden_ratio(record)
    whole = f" of {sig(ratio)} ({gap})" if ratio is not None and math.isfinite(ratio) else f" ({gap})"
    parts.append(f"{percent(cause.share)} of the gap{whole}")
    if cause.detail:
        parts.append(cause.detail)
    return ", ".join(parts)


def _factor(cause: Cause, record: StepRecord) -> float | None:
    """The cause's factor; where it has none because a norm is zero, the whole gap for a dominant cause."""
    factor = finite(cause.factor)
    if factor is None and cause.share > 0.5:
        return hidden_ratio(record)
    return factor


def _log(ratio: float) -> float:
    return math.log(ratio) if 0 < ratio < math.inf else math.inf
