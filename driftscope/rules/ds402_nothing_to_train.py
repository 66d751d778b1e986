"""DS402: a micro-batch without anything to train on."""

from __future__ import annotations

from driftscope.records import StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on an all-zero mask, or where every advantage is zero."""
    if record.tokens == 0:
        completion = record.completion_tokens
        evidence = "0 tokens are trained on"
        if completion:
            evidence += f"; all {completion} completion tokens are tool results or masked"
        return Finding("warning", "The mask of the micro-batch is all zero", evidence, MASK_REMEDY)
    if record.zero_advantage_share is not None and record.zero_advantage_share >= 1.0:
        evidence = "all advantages are zero: every group of completions got equal rewards"
        return Finding("info", "Every advantage of the micro-batch is zero", evidence, RULE.remedy)
    return None


MASK_REMEDY = (
    "Check mask_truncated_completions (it masks every completion that does not end within max_completion_length), "
    "max_completion_length itself, and the tool mask."
)
RULE = Rule(
    code="DS402",
    name="nothing-to-train-on",
    title="A micro-batch has nothing to train on",
    group="numerics",
    why=(
        "GRPO learns from differences of reward within a group. If all completions of a group get the same reward, "
        "their advantages are zero and the policy term has no gradient; if the mask is all zero, no token is trained "
        "on and a normaliser may divide by zero. Both look like a run that goes on."
    ),
    condition="tokens == 0 (warning), or zero_advantage_share == 1 (info: normal now and then, not if frequent).",
    remedy=(
        "If it happens often, make the reward finer or the prompts harder or easier, raise num_generations or the "
        "temperature; for an all-zero mask check mask_truncated_completions and max_completion_length."
    ),
    check=check,
)
