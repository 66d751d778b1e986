"""DS210: the engine's log-probs are of another temperature than the trainer's."""

from __future__ import annotations

from driftscope.records import StepRecord
from driftscope.rules._canary import mismatch_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the canary names ``temperature`` as a cause of the mismatch."""
    return mismatch_finding(record, thresholds, "temperature", RULE)


RULE = Rule(
    code="DS210",
    name="sampling-temperature",
    title="The engine's log-probs are of another temperature than the trainer's",
    group="sampling",
    why=(
        "The ratio compares log-probs of two different distributions: the engine's raw ones, or ones at "
        "another temperature, and the trainer's at its own. Each token's ratio is then off by its own amount, "
        "and a sequence product by a huge one."
    ),
    condition=(
        "The temperature that fits the engine's log-probs best differs from the configured one and explains "
        "at least 5% of the log ratio (cause temperature). Critical; warning where no correction is applied."
    ),
    remedy=(
        "Give the engine and GRPOConfig the same temperature, and let the engine return processed log-probs: "
        "logprobs_mode='processed_logprobs' (for a server: trl vllm-serve of the same TRL version)."
    ),
    check=check,
)
