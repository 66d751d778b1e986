"""When to measure what: pure functions of the optimizer step."""

from __future__ import annotations

from driftscope.records import Tier


def due(step: int, every: int) -> bool:
    """Whether a probe that runs every ``every`` steps runs on the 1-based ``step``; the first step is always due."""
    return every > 0 and (step - 1) % every == 0


def tier(step: int, *, spectrum_every: int, deep_every: int) -> Tier:
    """The most costly tier due on the 1-based ``step``."""
    if due(step, deep_every):
        return "deep"
    return "spectrum" if due(step, spectrum_every) else "light"
