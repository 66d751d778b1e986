"""DS204: a sequence ratio over long completions is decided by rounding."""

from __future__ import annotations

import math

from driftscope._text import percent, sig
from driftscope.doctor.facts import Facts
from driftscope.rules._settings import (
    ASSUMED_NOISE,
    completion_length,
    compute_dtype,
    corrects,
    grpo_settings,
    ratio_cap,
    ratio_mode,
    share_over,
)
from driftscope.rules.base import Finding, Rule, Thresholds

SURE = 2.0
"""Standard deviations between 1 and the cap under which noise alone crosses it (2.3% of the sequences at 2)."""


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where noise, or a drift smaller than it, takes the product of the token ratios over the cap."""
    settings = grpo_settings(facts)
    if settings is None or not corrects(settings) or not ratio_mode(settings).startswith("sequence"):
        return None
    cap, length = ratio_cap(settings), completion_length(settings)
    noise, source = _noise(facts)
    if cap is None or cap <= 1.0 or noise is None or noise <= 0.0:
        return None
    drift = math.log(cap) / length
    spread = noise * math.sqrt(length)
    crossing = math.log(cap) / spread
    if crossing >= SURE and drift >= noise:
        return None
    mode = ratio_mode(settings)
    done = "masked out" if mode.endswith("mask") else "truncated"
    evidence = (
        f"over {length} tokens a mean log-prob difference of {sig(drift)} a token crosses the cap of {cap:g}; the "
        f"noise of a log-prob is {sig(noise)} ({source}), {sig(spread)} over a completion, so that "
        f"{percent(share_over(math.log(cap), spread))} of the longest completions are {done} by noise alone "
        f"(ln {cap:g} = {sig(math.log(cap))}, mode {mode})"
    )
    return Finding("warning" if crossing < SURE else "info", RULE.title, evidence, RULE.remedy)


def _noise(facts: Facts) -> tuple[float | None, str]:
    """Standard deviation of a token's log-prob, and where it is from."""
    if facts.model is not None and facts.model.logp_noise is not None:
        return facts.model.logp_noise, "measured on this model against float32"
    dtype = compute_dtype(facts)
    return ASSUMED_NOISE.get(dtype), f"not measured: assumed for {dtype}"


RULE = Rule(
    code="DS204",
    name="sequence-product",
    title="The sequence importance sampling ratio of long completions is decided by noise",
    group="sampling",
    why=(
        "The sequence modes multiply the ratios of all tokens of a completion. A mean difference d of log-probs a "
        "token becomes exp(d * length), and independent noise of s a token becomes s * sqrt(length). With a thousand "
        "tokens and a cap of 3 a mean difference of 0.001 a token is enough: which completions are trained on is then "
        "decided by rounding and by length, and long completions are the first to go."
    ),
    condition=(
        "use_vllm with the correction in a sequence mode, and s * sqrt(max_completion_length) brings the cap within "
        "two standard deviations (warning), or the mean difference that crosses it is smaller than the noise s of one "
        "token (info). s is measured between the run's dtype and float32, else assumed from the dtype."
    ),
    remedy=(
        "Set vllm_importance_sampling_mode='token_truncate': one token's ratio is bounded by one token's noise. Else "
        "raise the cap with the length (vllm_importance_sampling_clip_max; its name in TRL 0.27.2 ends in _cap)."
    ),
    source="doctor",
    predict=predict,
)
