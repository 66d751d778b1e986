"""DS113: gradients are summed in a narrow dtype."""

from __future__ import annotations

from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``accumulation_dtype``."""
    return cause_finding(
        record,
        thresholds,
        "accumulation_dtype",
        does="sums the gradients of its chunks in a narrow dtype",
        would="sum the gradients of its chunks in a narrow dtype",
        remedy=RULE.remedy,
    )


RULE = Rule(
    code="DS113",
    name="accumulation-dtype",
    title="Gradients of chunks are summed in a narrow dtype",
    group="loss paths",
    why=(
        "A chunked loss adds the weight's gradient chunk by chunk. Liger before 0.8 does so in the weight's "
        "own dtype; in bfloat16 each addition rounds to 8 bits, and small contributions are lost always in "
        "the same direction. The error of a single step looks as small as ever, but it biases the training."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`accumulation_dtype` in `causes`). Critical if "
        "its factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy="Upgrade to Liger-Kernel >= 0.8, or keep lm_head.weight in float32.",
    check=check,
)
