"""DS207: the sampling engine runs on old weights."""

from __future__ import annotations

from driftscope.records import StepRecord
from driftscope.rules._canary import mismatch_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the canary names ``stale_weights`` as a cause of the mismatch."""
    return mismatch_finding(record, thresholds, "stale_weights", RULE)


RULE = Rule(
    code="DS207",
    name="stale-weights",
    title="The sampling engine runs on old weights",
    group="sampling",
    why=(
        "The engine samples from an earlier policy than the one that is trained: completions, advantages and "
        "ratios belong to weights that are gone. The ratio looks harmless at first, since its mean stays near "
        "1, and drifts as the policy moves."
    ),
    condition=(
        "The canary scores a few freshly sampled tokens under the current weights and under those of an "
        "earlier look: the earlier ones explain at least 5% of the log ratio (cause stale_weights), and the "
        "mismatch exceeds noise_multiple (3) times the noise floor. Critical; warning where no correction is "
        "applied."
    ),
    remedy=(
        "The weight sync before generation does not reach the engine: with vllm_mode='server' restart trl "
        "vllm-serve and look for its communicator in the log, with 'colocate' check that nothing replaced the "
        "engine's load_weights and that sleep mode wakes the weights up; then train on from a checkpoint."
    ),
    check=check,
)
