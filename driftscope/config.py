"""Driftscope's own settings: what to measure how often, and what to do about it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from driftscope.errors import UsageError

DEFAULT_SPECTRUM_EVERY, DEFAULT_DEEP_EVERY = 20, 1000
DEFAULT_BUDGET = 0.02


@dataclass(frozen=True, kw_only=True)
class DriftscopeConfig:
    """Settings of one attached run.

    Raises ``UsageError`` for a value outside its domain, with the reason.
    """

    run_dir: str | Path = "runs/driftscope"
    """Where run.json, records.jsonl and report.html go; created if missing, appended to if it holds the same run."""

    mode: Literal["watch", "correct"] = "watch"
    """``watch`` changes nothing in the run. ``correct`` trains with TRL's own algebra on log-probs from Driftscope's
    fused linear head, whatever ``use_liger_kernel`` says: the memory of a fused path, the result of the reference."""

    spectrum_every: int = DEFAULT_SPECTRUM_EVERY
    """Measure coefficients, shadow paths and causes on every n-th optimizer step, the first included; 0 is never."""

    deep_every: int = DEFAULT_DEEP_EVERY
    """Add the real fused call and the full-parameter gradient norms on every n-th step, the first included; 0 is
    never. Costs about two further forward and backward passes of that step, and two copies of the gradient."""

    spectrum_micro_batches: int | None = None
    """Micro-batches of a window that a spectrum step measures, in turn; ``None`` is one, and all of them where every
    step is measured (``spectrum_every=1``). Deep steps measure all."""

    max_overhead: float | None = None
    """Share of the run's step time that Driftscope may cost. It keeps to it by measuring less often than
    ``spectrum_every`` and ``deep_every`` say. ``None``: 0.02 at the default cadence, and no limit where you set one
    yourself: what you ask for is measured. 0 is no limit."""

    sketch_size: int = 4096
    """Buckets of the gradient sketch of one module, where full gradients are too large to be compared exactly or are
    spread over several processes."""

    exact_gradient_bytes: int = 512 * 2**20
    """Full-parameter gradients of both paths are kept and compared exactly up to this size; sketched above it."""

    rank_journals: bool = False
    """Several processes: also keep each rank's own records in ``run_dir/ranks``; rank 0 writes the run's anyway."""

    gap_warning: float = 1.5
    """Ratio of gradient norms, in either direction, from which a gap is a warning."""

    gap_critical: float = 10.0
    """The same, critical."""

    on_divergence: Literal["warn", "stop"] = "warn"
    """What a critical finding does: ``warn`` only tells, ``stop`` ends the training after the current step."""

    console: bool = True
    """Print findings while the run goes on."""

    log_metrics: bool = True
    """Send ``driftscope/<group>/<stat>`` to whatever the trainer reports to."""

    report: bool = True
    """Write report.html when the training ends."""

    workspace_bytes: int = 512 * 2**20
    """Upper bound of the logits tile of a probe, bytes."""

    kept_mass_tokens: int = 512
    """Tokens per micro-batch on which the kept mass of truncated sampling is computed (it sorts the vocabulary)."""

    canary_tokens: int = 256
    """Tokens that the weight-sync canary scores again, at most on every analysed step; 0 switches it off."""

    canary_bytes: int = 4 * 2**30
    """Upper bound of the copy of the trainable weights that the canary keeps on the host; larger ones are not kept,
    and stale weights are then not told from other causes."""

    profile: str | Path = "verl"
    """Limits of the mismatch between trainer and engine: ``strict``, ``verl``, ``nemo``, ``trl``, or a JSON file of
    your own (``driftscope.profiles``)."""

    scatter_points: int = 256
    """Tokens per micro-batch kept for the report's coefficient scatter."""

    capsules: int = 3
    """Replay capsules saved on critical alarms, at most this many a run, each for another finding; 0 is never."""

    capsule_bytes: int = 256 * 2**20
    """Upper bound of hidden states and head weight in a capsule, and of what is held of a batch until it is saved."""

    def __post_init__(self) -> None:
        counts = ("spectrum_every", "deep_every", "kept_mass_tokens", "scatter_points", "canary_tokens", "capsules",
                  "exact_gradient_bytes")  # fmt: skip
        for name in counts:
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)!r} must not be negative; 0 switches it off.")
        if not 1.0 < self.gap_warning <= self.gap_critical:
            raise UsageError(
                f"gap_warning={self.gap_warning!r} and gap_critical={self.gap_critical!r} are ratios of gradient "
                "norms; use 1 < gap_warning <= gap_critical."
            )
        if self.mode not in ("watch", "correct"):
            raise UsageError(f"mode={self.mode!r} is not known; use 'watch' or 'correct'.")
        if self.on_divergence not in ("warn", "stop"):
            raise UsageError(f"on_divergence={self.on_divergence!r} is not known; use 'warn' or 'stop'.")
        if self.spectrum_micro_batches is not None and self.spectrum_micro_batches < 1:
            raise UsageError(f"spectrum_micro_batches={self.spectrum_micro_batches!r} must be at least 1.")
        if self.max_overhead is not None and not 0.0 <= self.max_overhead < 1.0:
            raise UsageError(f"max_overhead={self.max_overhead!r} is a share of the step time; use 0 (off) up to 1.")
        if self.sketch_size < 64 or self.sketch_size & (self.sketch_size - 1):
            raise UsageError(f"sketch_size={self.sketch_size!r} must be a power of two of at least 64.")
        if self.workspace_bytes <= 0:
            raise UsageError(f"workspace_bytes={self.workspace_bytes!r} must be positive: a probe needs a tile.")

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches that a spectrum step measures; ``None`` is all of them."""
        if self.spectrum_micro_batches is not None:
            return self.spectrum_micro_batches
        return None if self.spectrum_every == 1 else 1

    @property
    def budget(self) -> float:
        """The share of step time that is kept to; 0 is no limit."""
        if self.max_overhead is not None:
            return self.max_overhead
        own = (self.spectrum_every, self.deep_every) != (DEFAULT_SPECTRUM_EVERY, DEFAULT_DEEP_EVERY)
        return 0.0 if own else DEFAULT_BUDGET

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain JSON types."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}
