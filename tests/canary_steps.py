"""Step records with a canary's look, for the rules on it."""

from __future__ import annotations

from typing import Any

from driftscope.records import CanaryRecord, Cause
from driftscope.rules import Thresholds, evaluate
from tests.record_factory import honest_ratio, step


def looked(
    cause: str, agrees_with: Any = "current", *, share: float = 0.9, rms: float = 0.05, applied: bool = True
) -> Any:
    """A step whose canary found one cause beside noise."""
    ratio = honest_ratio()
    if not applied:
        ratio.applied = None
    detail = "what was seen\x1b[2J"
    ratio.causes = [
        Cause(id=cause, share=share, factor=1.1, detail=detail),
        Cause(id="engine_noise", share=1 - share, factor=1.0),
    ]
    canary = CanaryRecord(tokens=256, agrees_with=agrees_with, rms=rms, noise_floor=1e-3, distances={"current": rms})
    return step(is_ratio=ratio, canary=canary)


def found(record: Any, code: str, **limits: Any) -> Any:
    """The rule's alert on a record, or ``None``."""
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == code), None)


def check_rule(code: str, cause: str, agrees_with: str) -> None:
    """The rule fires on its cause alone, with its numbers; not within noise, below its share, or without a look."""
    alert = found(looked(cause, agrees_with), code)
    assert alert.severity == "critical"
    assert "what was seen [2J" in alert.evidence
    assert "90% of the mismatch of 0.0500 nats a token" in alert.evidence
    assert "256 tokens" in alert.evidence
    assert found(looked(cause, agrees_with, applied=False), code).severity == "warning"
    assert found(looked(cause, agrees_with, rms=2.9e-3), code) is None
    assert found(looked(cause, agrees_with, rms=2.9e-3), code, noise_multiple=2.0) is not None
    assert found(looked(cause, agrees_with, share=0.04), code) is None
    assert found(looked("engine_noise"), code) is None
    bare = looked(cause, agrees_with)
    bare.canary = None
    assert found(bare, code) is None
