"""DS201: truncated sampling biases the importance sampling ratio."""

from __future__ import annotations

from driftscope._text import percent, sig
from driftscope.doctor.facts import Facts, Settings
from driftscope.records import Severity, StepRecord
from driftscope.rules._ratios import EXACT_MASS, applied_mean, support_severity
from driftscope.rules._settings import (
    completion_length,
    corrects,
    grpo_settings,
    ratio_mode,
    sampling_values,
    truncates,
)
from driftscope.rules.base import Finding, Rule, Thresholds

ONLY_SAMPLER = "Set top_p=1.0, top_k=0 and min_p=None, so that the engine returns log-probs over the whole vocabulary."


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where the kept mass explains most of the ratio."""
    severity = support_severity(record, thresholds)
    ratio = record.is_ratio
    if severity is None or ratio is None:
        return None
    parts = [f"sampling keeps {percent(ratio.kept_mass)} of the probability mass per token"]
    if ratio.truncated_support_share is not None:
        share = min(max(ratio.truncated_support_share, 0.0), 1.0)
        parts.append(f"which explains {percent(share)} of the mean log ratio")
    mean = applied_mean(ratio)
    stats = ratio.applied if ratio.applied is not None else ratio.raw
    if mean is not None and stats is not None:
        per = f" per {stats.level}, mode {ratio.mode}" if ratio.mode else f" per {stats.level}"
        parts.append(f"{'applied' if ratio.applied is not None else 'raw'} ratio mean {sig(mean)}{per}")
    if ratio.applied is None:
        title = "Truncated sampling would bias the importance sampling ratio, which this run does not apply"
    else:
        title = "Truncated sampling biases the importance sampling ratio"
    token_mode = ratio.mode is not None and ratio.mode.startswith("token")
    return Finding(severity, title, ", ".join(parts), ONLY_SAMPLER if token_mode else RULE.remedy)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where the sampling of a configuration keeps less than the whole vocabulary; the ratio carries its mass."""
    settings = grpo_settings(facts)
    if settings is None or not settings.get("use_vllm") or not truncates(settings):
        return None
    if settings.logprobs_mode == "raw_logprobs":  # of the whole vocabulary, as the trainer's are
        return None
    values, mode = sampling_values(settings), ratio_mode(settings)
    token_mode = mode.startswith("token")
    length = 1 if token_mode else completion_length(settings)
    kept = facts.model.kept_mass if facts.model is not None else None
    if kept is not None and kept >= EXACT_MASS:
        return None
    named = ", ".join(f"{name}={values[name]:g}" for name in ("top_p", "top_k", "min_p") if _set(name, values[name]))
    parts = [named, *_expected(settings, kept, float(values["top_p"]), length)]
    if not corrects(settings):
        title = "Truncated sampling would bias the importance sampling ratio, which this run does not apply"
        return Finding("info", title, ", ".join(parts), RULE.remedy)
    severity = _foreseen_severity(kept, values, length, thresholds)
    title = "Truncated sampling will bias the importance sampling ratio"
    return Finding(severity, title, ", ".join([*parts, f"mode {mode}"]), ONLY_SAMPLER if token_mode else RULE.remedy)


def _set(name: str, value: float) -> bool:
    return value < 1.0 if name == "top_p" else value > 0


def _expected(settings: Settings, kept: float | None, top_p: float, length: int) -> list[str]:
    """What ratio to expect, in words."""
    if kept is not None:
        parts = [f"measured on this model: {percent(kept)} of the probability mass is kept per token"]
        if length > 1:
            parts.append(f"a sequence ratio of about {sig(kept**length)} over {length} tokens")
        return parts
    if settings.get("top_p", 1.0) >= 1.0 and top_p >= 1.0:
        return ["the kept mass was not measured, and top_k and min_p alone bound it by nothing"]
    parts = [f"not measured: each token's ratio lies between top_p = {sig(top_p)} and 1"]
    if length > 1:
        parts.append(f"over {length} tokens that multiplies to as little as {sig(top_p**length)}")
    return parts


def _foreseen_severity(kept: float | None, values: dict[str, float], length: int, thresholds: Thresholds) -> Severity:
    """By the sequence ratio that the kept mass makes; unmeasured, by a tenth of what top_p may cut away."""
    if kept is None:
        mild = 1.0 - UNMEASURED_PART * (1.0 - values["top_p"])
        return "critical" if mild**length < thresholds.ratio_critical else "warning"
    if kept**length < thresholds.ratio_critical:
        return "critical"
    return "warning" if kept**length < thresholds.ratio_low or kept < thresholds.kept_mass else "info"


UNMEASURED_PART = 0.1
"""Part of 1 - top_p that sampling is taken to cut away where it was not measured; a model that is sure cuts less."""

RULE = Rule(
    code="DS201",
    name="truncated-support",
    title="Truncated sampling biases the importance sampling ratio",
    group="sampling",
    why=(
        "With top_p, top_k or min_p the sampling engine renormalises its log-probs over the tokens it kept, while the "
        "trainer's are over the whole vocabulary. So each token's ratio carries the kept mass, and a sequence ratio "
        "carries it to the power of the length: 0.81 per token is 0.006 over 24 tokens. The correction then shrinks "
        "the loss for a reason that has nothing to do with the mismatch that it should correct."
    ),
    condition=(
        "kept_mass < 1 and it explains at least half of the mean log ratio. Critical if the mean applied ratio is "
        "under 0.1, warning if it is under 0.5 or kept_mass is under 0.99, info otherwise or where no correction is "
        "applied."
    ),
    remedy=(
        "Set top_p=1.0, top_k=0 and min_p=None, so that the engine returns log-probs over the whole vocabulary. If "
        "sampling must stay truncated, set vllm_importance_sampling_mode='token_truncate': the bias is then the kept "
        "mass of one token and no power of the length."
    ),
    check=check,
    predict=predict,
    foreseen=(
        "use_vllm with top_p < 1, top_k > 0 or min_p > 0 (generation_kwargs included), and the engine is asked for "
        "log-probs of what it samples. Expected ratio: the kept mass, measured on the model, to the power of "
        "max_completion_length in the sequence modes. Critical if it is under 0.1, warning if it is under 0.5 or the "
        "kept mass under 0.99, info otherwise or where no correction is applied. Without a measurement: critical if a "
        "tenth of the 1 - top_p that may be cut is enough for 0.1, else warning."
    ),
)
