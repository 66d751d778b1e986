"""DS208: a part of the sampling engine's weights is old."""

from __future__ import annotations

from driftscope.records import StepRecord
from driftscope.rules._canary import mismatch_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the canary names ``stale_module`` as a cause of the mismatch."""
    return mismatch_finding(record, thresholds, "stale_module", RULE)


RULE = Rule(
    code="DS208",
    name="stale-module",
    title="A part of the sampling engine's weights is old",
    group="sampling",
    why=(
        "Some of the engine's modules follow the trainer and some do not: a module that is repacked, "
        "quantised, tied or renamed at load can be missed by the weight sync without an error. The engine "
        "then samples from a model that exists nowhere else."
    ),
    condition=(
        "As DS207, where older values of single modules explain the log ratio better than those of the whole "
        "model (cause stale_module). Critical; warning where no correction is applied."
    ),
    remedy=(
        "Make the weight sync reach the modules that are named in the evidence: check the parameter names "
        "that TRL sends against the engine's, switch off weight repacking or quantisation of these modules in "
        "the engine, and untie or tie them alike in trainer and engine."
    ),
    check=check,
)
