"""DS102: the importance sampling correction is dropped."""

from __future__ import annotations

from driftscope._text import sig
from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._ratios import applied_mean
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``is_correction``."""
    return cause_finding(
        record,
        thresholds,
        "is_correction",
        does="drops the importance sampling correction",
        would="drop the importance sampling correction",
        remedy=RULE.remedy,
        extra=_ratio(record),
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("is_correction",),
        does="drops the importance sampling correction",
        remedy=RULE.remedy,
        extra="the ratio of the synthetic batch is about 0.8 a token",
    )


def _ratio(record: StepRecord) -> str:
    mean = applied_mean(record.is_ratio) if record.is_ratio is not None else None
    if mean is None or record.is_ratio is None:
        return ""
    return f"mean applied ratio {sig(mean)} (mode {record.is_ratio.mode or 'unknown'})"


RULE = Rule(
    code="DS102",
    name="is-correction-dropped",
    title="The importance sampling correction is dropped",
    group="loss paths",
    why=(
        "The sampling engine's log-probs differ from the trainer's, so TRL multiplies each token's loss by the "
        "importance sampling ratio exp(old - sampling log-prob). Liger's loss in TRL 0.27.2 has no such argument: the "
        "factor is silently left out, and the gradient differs by about 1 / ratio. With sequence modes the ratio is a "
        "product over the tokens, so the difference can be a hundredfold."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`is_correction` in `causes`). Critical if its factor "
        "reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at least 5% and the "
        "gradient differs by more than 1% plus noise; info below that. Info at most if the candidate is not what "
        "trains."
    ),
    remedy=(
        "Upgrade to TRL >= 1.13 (the correction is in the fused path from TRL 0.29.1 with Liger-Kernel 0.7.0, the "
        "other silent differences are gone in 1.13), or set use_liger_kernel=False until then."
    ),
    check=check,
    predict=predict,
    foreseen=FORESEEN + ": its importance sampling ratio is about 0.8 a token.",
)
