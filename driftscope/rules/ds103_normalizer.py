"""DS103: the paths divide the loss by different numbers."""

from __future__ import annotations

from driftscope._text import sig
from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``normalizer``."""
    return cause_finding(
        record,
        thresholds,
        "normalizer",
        does="divides the loss by another number than configured",
        would="divide the loss by another number than configured",
        remedy=RULE.remedy,
        extra=_normalizers(record),
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("normalizer",),
        does="divides the loss by another number than configured",
        remedy=RULE.remedy,
        extra="the other micro-batches of the synthetic window are 1.6 times as long",
    )


def _normalizers(record: StepRecord) -> str:
    if record.gap is None:
        return ""
    parts = []
    for name in (record.gap.candidate, record.gap.reference):
        path = record.paths.get(name)
        if path is not None and path.normalizer is not None:
            measured = (
                f" (measured {sig(path.normalizer_measured, 4)})" if path.normalizer_measured is not None else ""
            )
            parts.append(f"{name} {sig(path.normalizer, 4)}{measured}")
    return "divisors: " + ", ".join(parts) if parts else ""


RULE = Rule(
    code="DS103",
    name="normalizer-differs",
    title="The loss is divided by another number than configured",
    group="loss paths",
    why=(
        "The policy term is a sum over tokens divided by a normaliser. TRL's dapo and cispo divide by the "
        "trained tokens of the whole generation batch, Liger's by those of the current micro-batch and then "
        "by the accumulation steps. With uneven completion lengths the ratio of the two changes from one "
        "micro-batch to the next, so short micro-batches weigh too much, and the effective learning rate is "
        "not the one you set."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`normalizer` in `causes`). Critical if its "
        "factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy=(
        "Upgrade to TRL >= 1.13, where the fused path uses the same normaliser; until then set "
        "use_liger_kernel=False, or use loss_type='bnpo' or 'dr_grpo', whose normaliser needs no other micro- "
        "batch."
    ),
    check=check,
    predict=predict,
    foreseen=FORESEEN + ": the other micro-batches of its window are 1.6 times as long.",
)
