"""What to change first, in words; and what truncated sampling does to the ratio."""

from __future__ import annotations

from typing import Any

from driftscope._run_facts import Facts
from driftscope._text import percent, sig
from driftscope._verdict_engine import ENGINE_RULES, modules_words
from driftscope.rules._causes import RATIO_FIRST

Worst = dict[str, Any]  # rule -> its worst severity

CAUSE_RULES = {
    "is_correction": "DS102",
    "normalizer": "DS103",
    "tool_mask": "DS104",
    "kl_bias_correction": "DS105",
    "delta_clamp": "DS106",
    "logit_transform": "DS107",
    "head_adapter": "DS108",
    "extra_terms": "DS109",
}
GAP_RULES = ("DS101", *dict.fromkeys(CAUSE_RULES.values()))
ENGINE_ACTIONS = {
    "stale_weights": "First bring the sampling engine back to the trainer's weights",
    "stale_module": "First bring {} of the sampling engine back to the trainer's weights",
    "adapter_missing": "First give the sampling engine the adapter",
    "temperature": "First give engine and trainer the same temperature",
}
FALLBACK_ORDER = ("DS203", "DS110", "DS402", "DS901")


def first_action(facts: Facts | None, worst: Worst, remedies: dict[str, str], settings: dict[str, Any]) -> str | None:
    """What to change first: what is not finite, then an engine on other weights, a biased input, the path."""
    if facts is None:
        return "Run again with Driftscope attached before trainer.train(), with spectrum_every=1 for a short run."
    if is_bad(worst, "DS401"):
        return remedies["DS401"]
    path = _path_remedy(facts, worst, remedies)
    cause = engine_cause(facts, worst)
    if cause is not None:
        return _engine_first(facts, worst, remedies, settings, cause, path)
    if is_bad(worst, "DS201"):
        return _sampling_first(facts, settings, path)
    for rule in ("DS202", *(() if path else FALLBACK_ORDER)):
        if is_bad(worst, rule):
            return f"{remedies[rule]} Then: {path}" if path else remedies[rule]
    return path


def engine_cause(facts: Facts, worst: Worst) -> str | None:
    """What sets the engine apart from the trainer beyond its sampling settings, where a rule of it fired."""
    fired = [rule for rule in ENGINE_RULES.values() if is_bad(worst, rule)]
    if not fired:
        return None
    if facts.engine is None:  # an alert without a look on record
        return next(cause for cause, rule in ENGINE_RULES.items() if rule in fired)
    return facts.engine.main(fired)


def _engine_first(
    facts: Facts, worst: Worst, remedies: dict[str, str], settings: dict[str, Any], cause: str, path: str | None
) -> str:
    """An engine that scores with another policy makes every other number moot, so it comes first."""
    part = modules_words(facts.engine.worst) if facts.engine is not None else "the stale part"
    text = f"{ENGINE_ACTIONS[cause].format(part)}: every ratio, and what follows from it, is moot until then. "
    text += remedies[ENGINE_RULES[cause]]
    if cause != "temperature" and is_bad(worst, ENGINE_RULES["temperature"]):
        text += f" Also: {remedies[ENGINE_RULES['temperature']]}"
    if is_bad(worst, "DS201"):
        return f"{text} Then{_sampling_first(facts, settings, path).removeprefix('First')}"
    return f"{text} Then: {path}" if path is not None else text


def _sampling_first(facts: Facts, settings: dict[str, Any], path: str | None) -> str:
    off = {"top_p": "top_p=1.0", "top_k": "top_k=0", "min_p": "min_p=None"}
    names = list(_truncating(settings)) or list(off)
    text = f"First set {', '.join(off[n] for n in names)}"
    if facts.ratio_mode is None or facts.ratio_mode.startswith("sequence"):
        text += " (or, if sampling must stay truncated, vllm_importance_sampling_mode='token_truncate')"
    text += ", so that the importance sampling ratio is honest."
    if path is None:
        return text
    text += f" Then: {path}"
    if facts.live == "liger" and "is_correction" in facts.causes:
        text += (
            " Merely switching the fused path off would swap gradients that are too large for ones that hardly learn."
        )
    return text


def _path_remedy(facts: Facts, worst: Worst, remedies: dict[str, str]) -> str | None:
    """The remedy of the live path's largest cause, else of what else is wrong with the paths."""
    rules = [CAUSE_RULES[c] for c in facts.causes if c in CAUSE_RULES] if not facts.shadow else []
    for rule in (*rules, *GAP_RULES[1:], "DS112", "DS101"):
        if is_bad(worst, rule):
            return remedies[rule].removeprefix(RATIO_FIRST)
    return None


def is_bad(worst: Worst, rule: str) -> bool:
    """Whether the rule fired as a warning or worse."""
    return worst.get(rule) in ("warning", "critical")


def support_words(facts: Facts, settings: dict[str, Any]) -> str:
    """What truncated sampling does to the ratio: ``sampling with top_p=0.8 keeps 81% ...``."""
    who = sampler_words(settings, "sampling with {}") or "truncated sampling"
    text = f"{who} keeps {percent(facts.kept_mass)} of the probability mass per token"
    if facts.ratio_level == "sequence":
        over = f"over about {facts.length:.0f} tokens" if facts.length is not None else "over all its tokens"
        return f"{text}, so {over} the ratio of a sequence is about {sig(facts.ratio_mean)} instead of 1"
    return f"{text}, so the ratio of a token is about {sig(facts.ratio_mean)} instead of 1"


def sampler_words(settings: dict[str, Any], form: str) -> str:
    """The truncating settings in ``form``, empty where none is known."""
    active = _truncating(settings)
    return form.format(" and ".join(f"{k}={v:g}" for k, v in active.items())) if active else ""


def _truncating(settings: dict[str, Any]) -> dict[str, float]:
    """The sampling settings in force that cut the support."""
    found = {}
    for name in ("top_p", "top_k", "min_p"):
        value = settings.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            off = value >= 1 if name == "top_p" else value <= 0
            if not off:
                found[name] = float(value)
    return found
