"""One optimizer step: which micro-batches are measured, what was found, and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from driftscope.ranks.share import Local
from driftscope.records import StepRecord, Tier


def measured_micro_steps(step: int, tier: Tier, accumulation: int, limit: int | None) -> tuple[int, ...]:
    """The micro-batches of a step that get a record, ascending; the same on every rank.

    The last one on light steps, all on deep ones; on spectrum steps ``limit`` of them (``None``: all), each equally
    often over the steps of a run.
    """
    if tier == "light":
        return (accumulation - 1,)
    if tier == "deep" or limit is None or limit >= accumulation:
        return tuple(range(accumulation))
    first = (step * 2654435761 % 2**32 >> 16) % accumulation  # Knuth's multiplicative hash: no cadence hits one only
    return tuple(sorted((first + i) % accumulation for i in range(limit)))


@dataclass
class Window:
    """The accumulation window of one optimizer step. Times are host times in ms."""

    step: int
    tier: Tier
    chosen: tuple[int, ...]
    begun: float = field(default_factory=time.perf_counter)
    micro_step: int = 0
    records: dict[int, StepRecord] = field(default_factory=dict)
    locals: dict[int, Local] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # micro-batches whose analysis broke off
    grad_norm: Any = None
    own_ms: float = 0.0
    forward_spans: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def measures(self) -> bool:
        """Whether the micro-batch in hand is one that the tier measures, beyond a light look."""
        return self.tier != "light" and self.micro_step in self.chosen

    def batch_tier(self) -> Tier:
        """The tier of the micro-batch in hand."""
        return self.tier if self.micro_step in self.chosen else "light"

    @property
    def recorded(self) -> list[StepRecord]:
        """The records so far, in the order of their micro-batches."""
        return [self.records[m] for m in sorted(self.records)]

    def passed_ms(self) -> float:
        """Wall time since the step began."""
        return (time.perf_counter() - self.begun) * 1e3

    def forward_ms(self) -> float:
        """Time of this rank's own forward passes of the backbone, or NaN where they were not timed or still run."""
        total = 0.0
        for begin, end in self.forward_spans:
            if isinstance(begin, float):
                total += (end - begin) * 1e3
            elif end.query():
                total += begin.elapsed_time(end)
            else:
                return float("nan")
        return total if self.forward_spans else float("nan")
