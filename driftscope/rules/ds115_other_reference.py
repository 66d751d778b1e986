"""DS115: the reference model is not the policy that training starts from."""

from __future__ import annotations

from driftscope._text import sig
from driftscope.doctor.facts import Facts
from driftscope.rules._settings import grpo_settings
from driftscope.rules.base import Finding, Rule, Thresholds

SMALLEST = 1e-9
"""k3 KL a token, nats, that float32 leaves between two passes of the same weights."""
LARGE = 1e-2
"""k3 KL a token, nats, from which the start is called far away."""


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the measured KL at the start is more than rounding."""
    settings, model = grpo_settings(facts), facts.model
    if settings is None or model is None or model.copy or model.reference_kl is None:
        return None
    noise = thresholds.noise_multiple * (model.logp_noise or 0.0)
    floor = max(SMALLEST, noise**2 / 2)
    if model.reference_kl <= floor:
        return None
    beta = float(settings.get("beta", 0.0))
    evidence = (
        f"before the first step the KL to the reference ({model.reference or 'unnamed'}) is {sig(model.reference_kl)} "
        f"nats a token, {sig(beta * model.reference_kl)} in the loss with beta={beta:g}; rounding explains up to "
        f"{sig(floor)}"
    )
    return Finding("warning" if model.reference_kl >= LARGE else "info", RULE.title, evidence, RULE.remedy)


RULE = Rule(
    code="DS115",
    name="other-reference",
    title="The reference model is not the policy that training starts from",
    group="loss paths",
    why=(
        "The KL term is meant to keep the policy near its start. TRL loads the reference again from the name in the "
        "model's configuration, or takes it from an adapter: where the weights given to the trainer were changed "
        "after loading, where the adapter does not start at zero, or where a trained adapter is not copied whole, the "
        "KL is not zero at the start and pulls the policy towards another model from the first step on."
    ),
    condition=(
        "beta > 0 and the k3 KL a token between policy and reference, measured on the trainer through TRL's own "
        "reference path, exceeds rounding: (3 s)^2 / 2 with the measured noise s of a log-prob, at least 1e-9. "
        "Warning from 0.01 nats, info below. Not judged on a copy."
    ),
    remedy=(
        "Save the model you start from and give the trainer its path: model.save_pretrained(DIR), then "
        "GRPOTrainer(model=DIR). For an adapter with a start other than zero: merge_and_unload(), save, and give the "
        "new adapter as peft_config. Or set beta=0."
    ),
    source="doctor",
    predict=predict,
)
