"""The bias over deep steps, kept beside the journal with the trainer's checkpoints: a resumed run goes on with it.

``save`` at step n writes ``bias.step-<n>.pt`` into the run directory; ``load`` reads the one of the step that a run
goes on from. The latest two are kept.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from driftscope.errors import UsageError
from driftscope.sketch import BiasTracker, SketchLayout

KEPT = 2


def save(run_dir: Path, run_id: str, step: int, bias: BiasTracker) -> Path:
    """Write the bias as it is after optimizer step ``step``; a reader never sees half a file. Raises ``OSError``."""
    target = path(run_dir, step)
    unfinished = target.with_suffix(".tmp")
    try:
        torch.save({"run_id": run_id, "state": bias.state()}, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    for old in sorted(run_dir.glob("bias.step-*.pt"), key=lambda p: p.stat().st_mtime_ns)[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def load(run_dir: Path, run_id: str, step: int, layout: SketchLayout) -> BiasTracker | None:
    """The bias after step ``step`` of that run, ``None`` where there is none for this model and these settings."""
    source = path(run_dir, step)
    if not source.exists():
        return None
    kept = torch.load(source, map_location="cpu", weights_only=True)
    if kept["run_id"] != run_id:
        return None
    try:
        return BiasTracker.from_state(layout, kept["state"])
    except UsageError:
        return None


def path(run_dir: Path, step: int) -> Path:
    """Where the bias after a step is kept."""
    return run_dir / f"bias.step-{step}.pt"
