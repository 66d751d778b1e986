"""DS209: the sampling engine runs without the adapter."""

from __future__ import annotations

from driftscope.records import StepRecord
from driftscope.rules._canary import mismatch_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the canary names ``adapter_missing`` as a cause of the mismatch."""
    return mismatch_finding(record, thresholds, "adapter_missing", RULE)


RULE = Rule(
    code="DS209",
    name="adapter-missing",
    title="The sampling engine runs without the adapter",
    group="sampling",
    why=(
        "The trainer learns an adapter, and the engine samples from the base model: every completion is off- "
        "policy, further with each step, and the reward says nothing of what is trained."
    ),
    condition=(
        "The canary scores a few freshly sampled tokens with the adapters switched off, and these log-probs "
        "explain at least 5% of the log ratio (cause adapter_missing). Critical; warning where no correction "
        "is applied."
    ),
    remedy=(
        "Let TRL merge the adapter before it syncs the weights (vllm_mode='colocate' or 'server' of a TRL "
        "that supports PEFT), or load the adapter in the engine; check that the adapter is the active one and "
        "that its weights are in what is sent."
    ),
    check=check,
)
