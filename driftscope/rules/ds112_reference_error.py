"""DS112: TRL's own path differs from the configured algebra."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.doctor.facts import Facts
from driftscope.records import Severity, StepRecord
from driftscope.rules._stack import different_finding
from driftscope.rules.base import Finding, Rule, Thresholds, crossed, finite, noise_floor


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the reference's coefficients are off by more than rounding."""
    reference, oracle = record.paths.get("reference"), record.paths.get("oracle")
    error = finite(reference.coef_error) if reference is not None else None
    noise = noise_floor(record, thresholds)
    if reference is None or error is None or error <= max(thresholds.coef_error, noise):
        return None
    severity: Severity = "warning"
    parts = [f"relative error of the token coefficients {sig(error)} ({percent(error)})"]
    own = finite(reference.hidden_grad_norm)
    true = finite(oracle.hidden_grad_norm) if oracle is not None else None
    if own is not None and true is not None and true > 0:
        parts.append(f"hidden gradient norm {sig(own)} instead of {sig(true)} (ratio {sig(own / true)})")
        if record.live == "reference" and crossed(own / true, thresholds.gap_critical, noise):
            severity = "critical"
    if oracle is not None and reference.normalizer is not None and oracle.normalizer is not None:
        divisor = reference.normalizer_measured if reference.normalizer_measured is not None else reference.normalizer
        if abs(divisor - oracle.normalizer) > thresholds.effect * abs(oracle.normalizer):
            parts.append(f"divisor {sig(divisor, 4)} instead of {sig(oracle.normalizer, 4)}")
    return Finding(severity, RULE.title, "; ".join(parts), RULE.remedy)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where TRL's own path is to train and computes a setting that is in use otherwise."""
    remedy = (
        "Leave the setting at its default, or use a TRL version whose own path the probe finds to honour it; "
        "switching paths does not help."
    )
    return different_finding(facts, thresholds, path="reference", title=RULE.title, remedy=remedy)


RULE = Rule(
    code="DS112",
    name="reference-differs-from-oracle",
    title="TRL's own path differs from the configured loss in float64",
    group="loss paths",
    why=(
        "The reference is no yardstick by decree: it is compared with the configured loss, written from the algebra "
        "and evaluated in float64 on the same log-probs. Where it differs by more than rounding, either TRL's code "
        "does something that the configuration does not say, or the trainer was changed (a subclass, a patch), and a "
        "comparison of other paths with it says little."
    ),
    condition=(
        "coef_error of the reference > max(1e-4, noise_multiple (3) times the noise floor). Warning; critical if the "
        "reference is what trains and its gradient norm is off by gap_critical (10) or more."
    ),
    remedy=(
        "Compare the trainer's class and the installed TRL with what you meant to run: a subclass that overrides "
        "_compute_loss, or settings changed on trainer.args after construction. Judge the other paths by their own "
        "coef_error until this is clear."
    ),
    check=check,
    predict=predict,
    foreseen=(
        "TRL's own path is what trains, and the stack probe found a setting in use that it computes otherwise than "
        "the oracle, by more than 0.1% on a small synthetic batch: left out with no rule of its own "
        "(steps_per_generation ...), or neither on nor off (a loss type). Critical if the norm is off by "
        "gap_critical (10) or more, else warning."
    ),
)
