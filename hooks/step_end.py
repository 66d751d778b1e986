"""The end of an optimizer step: this rank's window is completed, and becomes the record of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from driftscope.hooks.guard import Guard
from driftscope.hooks.probe import Probe
from driftscope.hooks.ranks import Ranks
from driftscope.hooks.together import Step
from driftscope.hooks.window import Window
from driftscope.records import StepRecord

if TYPE_CHECKING:
    from driftscope.hooks.scope import Scope


def gradient_size(probe: Probe | None, window: Window, ranks: Ranks) -> int:
    """Numbers of a deep step's gradients in the exchange: the same on every rank, whatever became of them there."""
    if window.tier != "deep" or not ranks.open or probe is None:
        return 0
    return probe.deep.packed_size if probe.deep.refusal() is None else 0


def close_window(probe: Probe | None, window: Window, guard: Guard, size: int) -> Tensor | None:
    """Complete the last record of the window; returns this rank's gradients where they go to the others."""
    if probe is not None:
        guard.run("gather", probe.heads.release)
    if not window.records:
        return None
    last = window.recorded[-1]
    if window.grad_norm is not None:
        last.live_grad_norm = float(window.grad_norm)
    if probe is not None:
        if size:
            parts = guard.run("param_norm", probe.deep.local, last, window.micro_step)
            return parts.packed if parts is not None else None
        guard.run("param_norm", probe.deep.close, last, window.micro_step)
    return None


def whole_records(scope: Scope, window: Window, told: Step | None) -> list[StepRecord]:
    """The records of the window over all ranks, as far as they are known; rank 0 makes them."""
    ranks, guard, probe = scope.together.ranks, scope.guard, scope.probe
    if told is None:
        if ranks.several:
            for record in window.records.values():
                record.unavailable["ranks"] = ranks.why or "the ranks have not been heard"
        return window.recorded
    for rank, stage in scope.together.news(told):
        scope.recorder.note(window.step, stage, f"it is off on rank {rank}, which goes on without it", rank)
    merged = guard.run("ranks", scope.together.merged, window, told, scope.blank)
    if merged is None:
        for record in window.records.values():
            record.unavailable["ranks"] = guard.off["ranks"]
        return window.recorded
    whole = [merged[m] for m in sorted(merged)]
    if probe is not None:
        for record in whole:
            guard.run("profile", probe.limits, record)
        if told.gradient.numel() and whole:
            guard.run("param_norm", probe.deep.fill, whole[-1], told.gradient, ranks.processes)
    return whole
