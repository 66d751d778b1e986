"""DS205: a temperature at which GRPO does not learn, or which is not the one that is scored."""

from __future__ import annotations

import math

from driftscope._text import percent, sig
from driftscope.doctor.facts import Facts, Settings
from driftscope.rules._settings import completion_length, corrects, grpo_settings, sampling_values
from driftscope.rules.base import Finding, Rule, Thresholds

IDENTICAL = 0.5
"""Probability that two completions of a prompt are identical from which groups are taken to collapse."""
LOW = 0.2
"""Temperature under which that is said where it could not be measured."""


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires for a temperature that is not positive, not the one that is scored, or so low that completions repeat."""
    settings = grpo_settings(facts)
    if settings is None:
        return None
    sampled, scored = float(sampling_values(settings)["temperature"]), float(settings.get("temperature", 1.0))
    if scored <= 0 or sampled <= 0:
        return _not_positive(sampled, scored)
    return (
        _two_temperatures(settings, sampled, scored) or _raw(settings, sampled) or _repeats(facts, settings, sampled)
    )


def _not_positive(sampled: float, scored: float) -> Finding:
    evidence = (
        f"temperature={scored:g}: the trainer divides every logit by it, so that log-probs are not numbers"
        if scored <= 0
        else f"generation_kwargs sets temperature={sampled:g}: all completions of a prompt are then the same"
    )
    if scored < 0:
        evidence = f"temperature={scored:g} turns the distribution upside down: the least likely tokens score highest"
    return Finding("critical", "The temperature is not positive", evidence, "Set temperature=1.0.")


def _two_temperatures(settings: Settings, sampled: float, scored: float) -> Finding | None:
    """``generation_kwargs`` changes what is sampled and not what is scored."""
    if math.isclose(sampled, scored, rel_tol=1e-6):
        return None
    consequence = (
        "the importance sampling ratio corrects for a difference that the settings made"
        if corrects(settings)
        else "the loss takes the samples for those of another distribution"
    )
    return Finding(
        "warning",
        "Completions are sampled at one temperature and scored at another",
        f"generation_kwargs samples at {sampled:g}, the trainer divides the logits by temperature={scored:g}: "
        f"{consequence}",
        f"Set temperature={sampled:g} and take it out of generation_kwargs.",
    )


def _raw(settings: Settings, sampled: float) -> Finding | None:
    """The engine's log-probs are those before the temperature."""
    if sampled == 1.0 or settings.logprobs_mode != "raw_logprobs" or not corrects(settings):
        return None
    return Finding(
        "warning",
        "The sampling log-probs do not have the temperature in them",
        f"temperature={sampled:g}, and the installed TRL asks the engine for raw log-probs: the importance sampling "
        "ratio compares a tempered distribution with one that is not",
        "Set temperature=1.0, vllm_importance_sampling_correction=False, or install a TRL that asks for "
        "processed_logprobs.",
    )


def _repeats(facts: Facts, settings: Settings, sampled: float) -> Finding | None:
    """Completions of a prompt are likely to be identical."""
    length = completion_length(settings)
    collision = facts.model.log_collision if facts.model is not None else None
    if collision is not None:
        same = math.exp(collision * length)
        if same < IDENTICAL:
            return None
        evidence = (
            f"temperature={sampled:g}: two completions of {length} tokens are identical with probability "
            f"{percent(same)} (measured on this model: "
            f"two samples agree in a token with {percent(math.exp(collision))})"
        )
        return Finding("warning", RULE.title, evidence, RULE.remedy)
    if sampled > LOW:
        return None
    evidence = (
        f"temperature={sampled:g} was not tried on the model; tokens more than {sig(sampled * math.log(20))} nats "
        "less likely than the best are sampled less than 1/20 as often as it"
    )
    return Finding("info", RULE.title, evidence, RULE.remedy)


RULE = Rule(
    code="DS205",
    name="temperature",
    title="The temperature is so low that the completions of a group repeat each other",
    group="sampling",
    why=(
        "GRPO learns from differences between completions of one prompt. At a very low temperature they are "
        "identical, their rewards too, and every advantage is zero. The trainer divides its logits by `temperature` "
        "as well: at 0 its log-probs are infinite. A temperature in generation_kwargs reaches the sampler alone, so "
        "that the tokens are scored under another distribution than the one they were drawn from."
    ),
    condition=(
        "temperature <= 0 (critical); generation_kwargs has another temperature than the trainer, or the engine's "
        "log-probs are raw, the ratio is applied and temperature is not 1 (warning); two completions of "
        "max_completion_length tokens are identical with a probability of at least 0.5, from the sum of squared token "
        "probabilities measured on the model (warning), or temperature <= 0.2 where it was not measured (info)."
    ),
    remedy="Set temperature=1.0; for less random answers lower it at evaluation only.",
    source="doctor",
    predict=predict,
)
