"""DS110: the trainer reports another gradient norm than the live path's."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.records import StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite, noise_floor


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where both norms are known and differ."""
    live = record.paths.get(record.live)
    reported, measured = finite(record.live_grad_norm), finite(live.param_grad_norm) if live is not None else None
    if reported is None or measured is None or max(reported, measured) <= 0:
        return None
    difference = abs(reported - measured) / max(reported, measured)
    if difference <= thresholds.reported_norm + noise_floor(record, thresholds):
        return None
    return Finding(
        "warning",
        "The trainer's grad_norm is not the norm of the gradient that the live path gives",
        f"reported {sig(reported, 4)}, recomputed over the window {sig(measured, 4)} ({percent(difference)} apart)",
        RULE.remedy,
    )


RULE = Rule(
    code="DS110",
    name="reported-norm-differs",
    title="The reported gradient norm disagrees with the live path",
    group="loss paths",
    why=(
        "On deep steps the gradient of all trainable parameters over the whole accumulation window is recomputed for "
        "the live path. The trainer clips on its own grad_norm; if the two differ, something between the loss and the "
        "clipping changes the gradient: a scaler, a hook, a frozen or shared parameter, or an accumulation that "
        "divides otherwise than configured."
    ),
    condition=(
        "|reported - recomputed| / max of both > 1% plus noise_multiple (3) times the noise floor; both are L2 norms "
        "before clipping. Silent where one of them could not be had."
    ),
    remedy=(
        "Check gradient_accumulation_steps, the mixed-precision scaler (fp16), parameter hooks and what else touches "
        ".grad before clipping (a callback's on_pre_optimizer_step, a DeepSpeed or FSDP configuration)."
    ),
    check=check,
)
