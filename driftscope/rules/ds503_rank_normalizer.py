"""DS503: the ranks divide by different numbers although the configured loss divides by one."""

from __future__ import annotations

from driftscope._text import sig
from driftscope.records import Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the live path's measured divisors differ between ranks and the intended ones do not."""
    ranks = record.ranks
    if ranks is None or "normalizer" not in ranks.disagree:
        return None
    known = [(r.rank, r.tokens, v) for r in ranks.rows if (v := finite(r.normalizer_measured)) is not None and v > 0]
    if len(known) < 2:
        return None
    divisors = [v for *_, v in known]
    listed = ", ".join(f"rank {rank}: {sig(v)} for {tokens} tokens" for rank, tokens, v in known[:8])
    apart = max(divisors) / min(divisors)
    evidence = f"measured divisors {listed}; a token weighs {sig(apart)} times as much on one rank as on another"
    severity: Severity = "critical" if apart >= thresholds.gap_critical else "warning"
    return Finding(severity, RULE.title, evidence, RULE.remedy)


RULE = Rule(
    code="DS503",
    name="rank-normalizer",
    title="Each rank divides by its own number of tokens",
    group="ranks",
    why=(
        "The configured loss is a sum over all tokens of the batch, divided by one number, the same on every rank. A "
        "path that divides by what its own rank holds is right in one process and in every test on one GPU. On many "
        "ranks the mean of the ranks' gradients then weighs a token by how few its rank has: short completions count "
        "more, and which ones is decided by how the batch was split."
    ),
    condition=(
        "Several processes, an analysed step: the divisors that the live coefficients imply differ between ranks by "
        "more than 5%, while those of the configured loss are the same."
    ),
    remedy=(
        "Reduce the normaliser over the ranks: update TRL and Liger-Kernel (Liger 0.6.5 and 0.8.5 average it), "
        "or train with mode='correct'. In a loss of your own, divide by num_items_in_batch / num_processes."
    ),
    check=check,
)
