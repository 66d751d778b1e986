"""DS113: the fused path computes a term that has no rule of its own otherwise than configured."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.rules._stack import different_finding
from driftscope.rules.base import Finding, Rule, Thresholds


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the fused path is to train and computes a setting that is in use otherwise."""
    return different_finding(facts, thresholds, path="liger", title=RULE.title, remedy=RULE.remedy)


RULE = Rule(
    code="DS113",
    name="computed-otherwise",
    title="The fused Liger path computes a setting otherwise than configured",
    group="loss paths",
    why=(
        "TRL and Liger each write the loss anew: the loss type, the level of the importance sampling, the "
        "temperature, masks and the entropy bonus exist twice, and a release can change one of the two. An example is "
        "luspo with token-level ratios: the fused loss in TRL 1.13 weighs each token loss by the sequence's length "
        "and averages over all positions, padding included; TRL's own sums over the trained tokens. No error is "
        "raised; another loss is optimised than the one that the setting names."
    ),
    condition=(
        "The configuration trains on Liger's loss, uses the setting, and the stack probe found its gradient on a "
        "small synthetic batch off by more than 0.1% from the configured loss in float64: neither with nor without "
        "the term, or left out for a setting that has no rule of its own (DS102 to DS108). Critical if the norm is "
        "off by gap_critical (10) or more, else warning."
    ),
    remedy="Set use_liger_kernel=False, or leave the setting at its default; a newer TRL may compute both alike.",
    source="doctor",
    predict=predict,
)
