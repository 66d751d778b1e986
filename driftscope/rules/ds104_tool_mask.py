"""DS104: tool results are trained on."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``tool_mask``."""
    return cause_finding(
        record,
        thresholds,
        "tool_mask",
        does="trains on tool results: it drops the tool mask",
        would="train on tool results: it drops the tool mask",
        remedy=RULE.remedy,
        extra=_tokens(record),
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("tool_mask",),
        does="trains on tool results: it drops the tool mask",
        remedy=RULE.remedy,
    )


def _tokens(record: StepRecord) -> str:
    if record.tokens is None or record.completion_tokens is None:
        return ""
    tools = record.completion_tokens - record.tokens
    return f"{tools} of {record.completion_tokens} completion tokens are tool results" if tools > 0 else ""


RULE = Rule(
    code="DS104",
    name="tool-mask-dropped",
    title="The tool mask is dropped: tool results are trained on",
    group="loss paths",
    why=(
        "Tokens that a tool returned stand in the completion, but the policy did not choose them; TRL "
        "multiplies the completion mask by the tool mask so that they get no gradient. A path that uses the "
        "completion mask alone rewards the model for predicting tool output, and counts those tokens in its "
        "normaliser."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`tool_mask` in `causes`). Critical if its "
        "factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy=(
        "Upgrade to TRL >= 0.29.1 with Liger-Kernel >= 0.7.0, whose fused path gets the tool mask; until then "
        "set use_liger_kernel=False for runs with tools."
    ),
    check=check,
    predict=predict,
    foreseen=FORESEEN + ".",
)
