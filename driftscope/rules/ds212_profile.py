"""DS212: the mismatch crosses a limit of the threshold profile."""

from __future__ import annotations

from driftscope._text import printable, sig
from driftscope.records import Severity, StepRecord
from driftscope.rules._ratios import support_explains
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on the first limit crossed; the evidence lists all of them."""
    if not record.violations or (record.is_ratio is not None and support_explains(record.is_ratio)):
        return None
    parts = []
    for v in record.violations:
        widened = f", widened from {sig(v.nominal)} by the noise floor" if v.allowed != v.nominal else ""
        source = f"; {printable(v.source)}" if v.source else ""
        parts.append(f"{printable(v.figure)} {sig(v.value)}, limit {sig(v.allowed)}{widened}{source}")
    applied = record.is_ratio is not None and record.is_ratio.applied is not None
    severity: Severity = "warning" if applied else "info"
    return Finding(severity, RULE.title, " | ".join(parts), RULE.remedy)


RULE = Rule(
    code="DS212",
    name="threshold-profile",
    title="The mismatch between trainer and sampling engine crosses a limit of the threshold profile",
    group="sampling",
    why=(
        "The limits are those that verl, NeMo-RL or TRL use for the same figures: past them the samples say too "
        "little about the policy that is trained. The cause is another rule's to find; this one says that it is too "
        "much."
    ),
    condition=(
        "A figure of the mismatch crosses a limit of the configured profile (`profile`, default verl: mean ratio "
        "outside [0.5, 2], effective sample size under 0.3, standard deviation over 1, |KL| over 0.1, chi2 over 1), "
        "each limit widened to a multiple of the noise floor. Warning; info where no correction is applied. Where the "
        "kept mass of truncated sampling explains the ratio, DS201 speaks instead."
    ),
    remedy=(
        "Look at the causes of the ratio in the same record and mend the first of them: weights, sampling settings, "
        "number format. Until then vllm_importance_sampling_mode='token_truncate' bounds what one token can do. "
        "Another profile: driftscope.attach(trainer, profile='strict' | 'verl' | 'nemo' | 'trl' | 'mine.json')."
    ),
    check=check,
)
