"""DS105: the bias correction of the KL term is dropped."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.records import StepRecord
from driftscope.rules._causes import cause_finding
from driftscope.rules._stack import FORESEEN, dropped_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the record names the cause ``kl_bias_correction``."""
    return cause_finding(
        record,
        thresholds,
        "kl_bias_correction",
        does="drops the bias correction of the KL term (use_bias_correction_kl)",
        would="drop the bias correction of the KL term (use_bias_correction_kl)",
        remedy=RULE.remedy,
    )


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the stack probe found the term left out of the path that is to train."""
    return dropped_finding(
        facts,
        thresholds,
        ("kl_bias_correction",),
        does="drops the bias correction of the KL term (use_bias_correction_kl)",
        remedy=RULE.remedy,
    )


RULE = Rule(
    code="DS105",
    name="kl-bias-correction-dropped",
    title="The KL bias correction is dropped",
    group="loss paths",
    why=(
        "With use_bias_correction_kl the k3 estimate of the KL divergence is multiplied by the policy ratio, "
        "which makes its gradient unbiased off-policy. Without the factor the KL term pulls in a biased "
        "direction as soon as the policy has moved away from the one that sampled. It matters in proportion "
        "to beta."
    ),
    condition=(
        "The swap of this one term explains a part of the gap (`kl_bias_correction` in `causes`). Critical if "
        "its factor reaches gap_critical (10), warning if it reaches gap_warning (1.5), or if its share is at "
        "least 5% and the gradient differs by more than 1% plus noise; info below that. Info at most if the "
        "candidate is not what trains."
    ),
    remedy=(
        "Upgrade to TRL >= 1.13; until then set use_liger_kernel=False, or set use_bias_correction_kl=False "
        "(or beta=0.0) so that the run says what it does."
    ),
    check=check,
    predict=predict,
    foreseen=FORESEEN + ", with beta=0.5.",
)
