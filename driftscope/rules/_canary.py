"""What the rules on the canary's look share: a cause of the mismatch, its share, and how far the engine is off."""

from __future__ import annotations

from driftscope._text import percent, printable, sig
from driftscope.records import Cause, Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite

MIN_SHARE = 0.05


def mismatch_cause(record: StepRecord, cause_id: str) -> Cause | None:
    """The canary's cause of that id, where it makes up enough of the mismatch to matter."""
    if record.canary is None or record.is_ratio is None:
        return None
    cause = next((c for c in record.is_ratio.causes if c.id == cause_id), None)
    return cause if cause is not None and abs(cause.share) >= MIN_SHARE else None


def mismatch_finding(record: StepRecord, thresholds: Thresholds, cause_id: str, rule: Rule) -> Finding | None:
    """The finding of one cause. Critical; a mismatch within the noise floor never counts.

    A warning where the loss applies no correction: the engine is as far off, but no ratio is distorted by it.
    """
    cause = mismatch_cause(record, cause_id)
    if cause is None or record.canary is None or record.is_ratio is None:
        return None
    seen = record.canary
    rms, floor = finite(seen.rms), finite(seen.noise_floor)
    if rms is None or (floor is not None and rms <= thresholds.noise_multiple * floor):
        return None
    parts = [printable(cause.detail)] if cause.detail else []
    parts.append(
        f"this is {percent(cause.share)} of the mismatch of {sig(rms)} nats a token (rms, {seen.tokens} tokens)"
    )
    if floor is not None:
        parts.append(f"the trainer's own rounding noise is {sig(floor)}")
    severity: Severity = "critical" if record.is_ratio.applied is not None else "warning"
    return Finding(severity, rule.title, "; ".join(parts), rule.remedy)
