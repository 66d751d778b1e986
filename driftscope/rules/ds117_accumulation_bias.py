"""DS117: what the trainer accumulates differs from the gradient of its loss in the same direction, step after step."""

from __future__ import annotations

from driftscope._text import percent, printable, sig
from driftscope.records import BiasRecord, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite

STEPS = 16
"""Deep steps before anything is claimed."""
SCORE = 20.0
"""Squared bias in its standard errors under no bias. High, since noise in few directions has a long tail."""
ERRORS = 8.0
"""Standard errors by which the size must exceed zero, and the part along the gradient what is allowed."""
SIZE = 1e-3
"""Relative bias below which nothing counts."""


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the bias is significant and larger than one rounding of the same computation."""
    bias = record.gradient.bias if record.gradient is not None else None
    if bias is None or bias.steps < STEPS:
        return None
    allowed = _allowed(record, thresholds)
    parts = [text for text in (_mean(bias, allowed), _along(bias, allowed)) if text is not None]
    if not parts:
        return None
    evidence = (
        f"over {bias.steps} deep steps {'; '.join(parts)}; a single step's difference is {sig(bias.noise)}, and up to "
        f"{sig(allowed)} is allowed"
    )
    return Finding("warning", RULE.title, evidence, RULE.remedy)


def _allowed(record: StepRecord, thresholds: Thresholds) -> float:
    """The measured rounding noise of one computation in this dtype, ``SIZE`` at least."""
    measured = finite(record.gap.noise_floor) if record.gap is not None else None
    return max(SIZE, thresholds.unmeasured_noise if measured is None else measured)


def significant(bias: BiasRecord) -> bool:
    """Whether the mean difference is told from noise, in however few directions the noise lies."""
    value, error, score = finite(bias.size.value), finite(bias.size.error), finite(bias.score)
    if value is None or error is None or score is None:
        return False
    return bias.steps >= STEPS and score >= SCORE and value > ERRORS * error


def _mean(bias: BiasRecord, allowed: float) -> str | None:
    """The mean difference, in whatever direction."""
    value, error, score = bias.size.value, bias.size.error, bias.score
    if not significant(bias) or value is None or error is None or value - 2 * error <= allowed:
        return None
    return (
        f"the mean of (accumulated - recomputed) / |recomputed| is {sig(value)} +- {sig(error)} in norm, "
        f"{sig(score)} standard errors of none, most of it in {_module(bias.module)}"
    )


def _along(bias: BiasRecord, allowed: float) -> str | None:
    """Its part along the gradient: too short or too long."""
    value = finite(bias.along.value) if bias.along is not None else None
    error = finite(bias.along.error) if bias.along is not None else None
    if value is None or error is None or abs(value) - ERRORS * error <= allowed:
        return None
    return (
        f"the accumulated gradient is {percent(abs(value))} too {'short' if value < 0 else 'long'} along the "
        f"recomputed one (+- {percent(error)}), most of it in {_module(bias.along_module)}"
    )


def _module(name: str | None) -> str:
    return printable(name) if name else "no single module"


RULE = Rule(
    code="DS117",
    name="accumulation-bias",
    title="The accumulated gradient is biased: its error has the same direction step after step",
    group="loss paths",
    why=(
        "Rounding makes every step's gradient a little wrong. As long as the errors differ from step to step they "
        "average out over a run. Where gradients of chunks, micro-batches or ranks are summed in a narrow dtype, or "
        "rounded otherwise than to the nearest value, a part of the error stays: it moves the weights like a gradient "
        "of its own, though each step's error looks as small as ever. It is seen only in the mean over many steps of "
        "the signed difference between what the trainer accumulated and the same path recomputed and summed in high "
        "precision (cause accumulation_dtype)."
    ),
    condition=(
        "After 16 deep steps: the squared mean difference exceeds 20 of its standard errors under no bias, its root "
        "eight of its own, and its root less two of them the noise floor of one computation in this dtype (1e-3 at "
        "least); or the mean part along the gradient exceeds that floor by eight standard errors. Silent where the "
        "trainer does not clip (max_grad_norm=0), since the accumulated gradient is read there, and where gradients "
        "are sharded."
    ),
    remedy=(
        "Sum gradients in float32: weights in float32 with bf16 autocast, a larger micro-batch with fewer "
        "accumulation steps, Liger 0.8 or later (before, the head's chunk gradients are summed in the weight's "
        "dtype), float32 gradient reduction under DDP. If the size is far above rounding, look for what else adds to "
        ".grad: a loss term that does not go through the logits (a router's auxiliary loss), a hook, a callback."
    ),
    check=check,
)
