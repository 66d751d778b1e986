"""A training step whose backward has failed, explained: the same check as before a run, on the model as it is."""

from __future__ import annotations

import time
from typing import Any

from driftscope.doctor.facts import Facts, GradientFlow
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.records import AlertRecord
from driftscope.rules.base import Finding, Thresholds
from driftscope.rules.ds301_backward_raises import RULE, predict

NO_GRAPH = "does not require grad"
"""In the message that torch raises where the loss has no graph."""
LOSS = (
    "The model's own backward works, so the loss of the trainer is cut from the model's output: look for a detach, "
    ".item() or no_grad in what computes the loss."
)


def explain(trainer: Any, error: BaseException, step: int) -> AlertRecord:
    """The alert DS301 for a step that raised ``error``, which gets a note with the cause and the remedy.

    Runs a forward and backward of its own on a short sequence; the model stays as it is.
    """
    flow, finding = _judge(trainer, error)
    error.add_note(f"driftscope DS301: {flow.message if not flow.ok else finding.title}\nremedy: {finding.remedy}")
    return AlertRecord(
        time=time.time(),
        step=step,
        rank=trainer.accelerator.process_index,
        rule=RULE.code,
        severity=finding.severity,
        title=finding.title,
        evidence=finding.evidence,
        remedy=finding.remedy,
    )


def _judge(trainer: Any, error: BaseException) -> tuple[GradientFlow, Finding]:
    if any(getattr(trainer, name, False) for name in ("is_deepspeed_enabled", "is_fsdp_enabled")):
        flow = GradientFlow(missing=(), error=str(error), message="The model is sharded: it was not run again.")
        return flow, Finding("critical", RULE.title, f"the step raised: {error}; {flow.message}", RULE.remedy)
    flow = gradient_flow(trainer)
    finding = predict(Facts(flow=flow), Thresholds())
    if finding is None:
        evidence = f"the step raised: {error}; {flow.message}"
        return flow, Finding("critical", RULE.title, evidence, LOSS)
    return flow, finding
