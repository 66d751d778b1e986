"""The verdict in words: headline and summary from the facts of a run and its findings."""

from __future__ import annotations

import math
from typing import Any

from driftscope._run_facts import Facts
from driftscope._text import path_words, percent, printable, sentence, sig, times
from driftscope._verdict_advice import GAP_RULES, Worst, engine_cause, is_bad, sampler_words, support_words
from driftscope._verdict_engine import ENGINE_RULES, canary_words, engine_headline, shares
from driftscope.records import SEVERITIES

DOES = {
    "is_correction": "drops the importance sampling correction",
    "normalizer": "divides the loss by another number than configured",
    "tool_mask": "trains on tool results",
    "kl_bias_correction": "drops the bias correction of the KL term",
    "delta_clamp": "drops the upper clamp of the policy ratio (delta)",
    "logit_transform": "skips what the model does to its logits",
    "head_adapter": "ignores the adapter on lm_head",
    "extra_terms": "holds a term that the configured loss does not have",
    "accumulation_dtype": "sums gradients in a narrow dtype",
}


def headline(facts: Facts | None, worst: Worst, titles: dict[str, str], settings: dict[str, Any]) -> str:
    """One sentence for a newcomer."""
    if facts is None:
        return "Nothing was measured: the run holds no analysed step, so nothing can be said about its loss."
    if worst.get("DS401") == "critical":
        return "Values that are NaN or infinite entered the training, so nothing after them can be trusted."
    cause = engine_cause(facts, worst)
    if cause is not None:
        return _engine_headline(facts, worst, titles, settings, cause)
    if any(is_bad(worst, rule) for rule in GAP_RULES):
        return _gap_headline(facts, worst, settings)
    if is_bad(worst, "DS112"):
        error = percent(facts.coef_errors.get("reference"))
        trains = ", and it is what trains" if facts.live == "reference" else ""
        return f"TRL's own path is not the configured loss: its token coefficients are off by {error}{trains}."
    if is_bad(worst, "DS201"):
        return f"{_what_trains(facts)}, but the importance sampling ratio is biased: {support_words(facts, settings)}."
    if is_bad(worst, "DS202"):
        return (
            f"{_what_trains(facts)}, but the importance sampling ratio is far from 1 (median {sig(facts.ratio_mean)}) "
            "and truncated sampling does not explain it."
        )
    for rule in sorted(worst, key=lambda r: (-SEVERITIES.index(worst[r]), r)):
        if is_bad(worst, rule):
            return f"{_what_trains(facts)}, but: {printable(titles[rule])}."
    if facts.shadow and any(rule in worst for rule in GAP_RULES):
        return f"{_what_trains(facts)}; {_shadow_words(facts)}."
    return f"{_what_trains(facts)}."


def _engine_headline(facts: Facts, worst: Worst, titles: dict[str, str], settings: dict[str, Any], cause: str) -> str:
    """The engine first, then the gap or the biased ratio that comes on top, if any."""
    text = printable(titles[ENGINE_RULES[cause]])
    if facts.engine is not None:
        text = engine_headline(facts.engine, cause)
    if any(is_bad(worst, rule) for rule in GAP_RULES):
        gap = _gap_headline(facts, worst, settings)
        return f"{text}; besides, {gap[:1].lower() + gap[1:] if gap.startswith('The ') else gap}"
    if is_bad(worst, "DS201"):
        return f"{text}; besides, the importance sampling ratio is biased: {support_words(facts, settings)}."
    return f"{text}, so that what it samples and scores is another policy than the one that trains."


def _what_trains(facts: Facts) -> str:
    """The good news, as far as it was measured."""
    live = sentence(path_words(facts.live))
    error = facts.coef_errors.get(facts.live)
    if error is not None:
        return f"{live} trains on the configured loss (relative error of its gradient {sig(error, 2)})"
    if not facts.shadow and facts.gap is not None:
        return f"{live} gives the gradient of {path_words(facts.reference or 'reference')} (ratio {sig(facts.gap, 4)})"
    return f"No difference was found in what {path_words(facts.live)} trains on, though its error is unavailable"


def _gap_headline(facts: Facts, worst: Worst, settings: dict[str, Any]) -> str:
    who = path_words(facts.live if facts.shadow or facts.candidate is None else facts.candidate)
    against = "the configured loss"
    if is_bad(worst, "DS112") and facts.reference == "reference":
        against = "TRL's own path, which itself differs from the configured loss"
    gap = _gap_of_headline(facts, worst)
    if gap is not None:
        how = f"about {times(gap)} than" if 0 < gap < math.inf else ("of zero, unlike" if gap == 0 else "unlike")
        text, joint = f"{sentence(who)} trains on gradients {how} {against}", " because it "
    else:
        text, joint = f"{sentence(who)} trains on another loss than the configured one", ": it "
    main = next(iter(facts.causes.items()), None) if not facts.shadow else None
    left = facts.unexplained or 0.0
    if main is not None and main[1][0] >= left and main[0] in DOES:
        text += f"{joint}{DOES[main[0]]} ({percent(main[1][0])} of the gap)"
    if left > 0.05 or (main is None and not facts.shadow) or _residual_only(facts, worst):
        text += ", and no known term explains " + (f"{percent(left)} of it" if left > 0.05 else "the difference")
    if is_bad(worst, "DS201") and main is not None and main[0] == "is_correction":
        text += f", and that correction is itself biased by truncated sampling{sampler_words(settings, ' ({})')}"
    elif is_bad(worst, "DS201"):
        text += ", and the importance sampling ratio is biased by truncated sampling"
    return text + "."


def _gap_of_headline(facts: Facts, worst: Worst) -> float | None:
    """The gap to name: the median, or the furthest from 1 where only a few steps cross the threshold."""
    if facts.shadow or not is_bad(worst, "DS101") or facts.gap is None:
        return None
    return facts.gap if facts.gap <= 0 or abs(math.log(facts.gap)) > math.log(1.1) else facts.worst_gap


def _residual_only(facts: Facts, worst: Worst) -> bool:
    return is_bad(worst, "DS109") and facts.shadow


def summary(facts: Facts | None, worst: Worst, settings: dict[str, Any], problems: list[str]) -> list[str]:
    """What stands behind the headline, a sentence or two a line."""
    read = [f"While reading: {problem}" for problem in problems]
    if facts is None:
        return [
            "Attach Driftscope before trainer.train() and let at least one analysed step pass (spectrum_every=1 "
            "analyses each step).",
            *read,
        ]
    span = f"step {facts.first_step}" if facts.first_step == facts.last_step else (
        f"steps {facts.first_step} to {facts.last_step}"
    )  # fmt: skip
    plural = "micro-batch was" if facts.records == 1 else "micro-batches were"
    lines = [f"{facts.records} {plural} analysed ({span}); numbers are medians. {_trains(facts)}"]
    lines += [*_gap_lines(facts), *_reference_lines(facts, worst), *_ratio_lines(facts, worst, settings)]
    if facts.unavailable:
        what = "; ".join(f"{printable(k)} ({printable(v)})" for k, v in sorted(facts.unavailable.items()))
        lines.append(f"Unavailable, and so not judged: {what}.")
    return lines + read


def _trains(facts: Facts) -> str:
    residual = f" Of its gradient, {sig(facts.residual, 2)} lies outside every token coefficient."
    return f"{sentence(path_words(facts.live))} is what trains.{residual if facts.residual is not None else ''}"


def _gap_lines(facts: Facts) -> list[str]:
    if facts.candidate is None or facts.reference is None:
        return ["No two paths could be compared, so no gap is known."]
    if facts.gap is None:
        return ["The gap between the paths is unavailable: no analysed micro-batch had a gradient on both."]
    sides = [(path_words(n), facts.norms.get(n)) for n in (facts.candidate, facts.reference)]
    norms = ", ".join(f"{who} {sig(norm)}" for who, norm in sides)
    text = f"Hidden gradient norm: {norms}; ratio {sig(facts.gap)}"
    if facts.worst_gap is not None and not math.isclose(facts.worst_gap, facts.gap, rel_tol=0.01):
        text += f" (furthest from 1: {sig(facts.worst_gap) if math.isfinite(facts.worst_gap) else 'infinite'})"
    if facts.param_gap is not None:
        text += f"; over all parameters {sig(facts.param_gap)}"
    lines = [text + "."]
    parts = [
        f"{DOES.get(name, printable(name))} ({percent(share)} of the gap"
        + (f", factor {sig(factor)})" if factor is not None else ")")
        for name, (share, factor) in facts.causes.items()
    ]
    if parts:
        lead = f"{sentence(_shadow_words(facts))}; that path does not train here. It" if facts.shadow else "Why: it"
        lines.append(f"{lead} {'; it '.join(parts)}. Unexplained: {_left(facts)}.")
    elif facts.unexplained is not None and facts.unexplained > 0.05:
        lines.append(f"Unexplained: {_left(facts)}.")
    return lines


def _left(facts: Facts) -> str:
    return percent(facts.unexplained) if facts.unexplained is not None else "unavailable"


def _shadow_words(facts: Facts) -> str:
    who = "switching use_liger_kernel on" if facts.candidate == "liger" and facts.live_head != "fused" else (
        "Liger's own loss" if facts.candidate == "liger" else f"switching to {path_words(facts.candidate or '')}"
    )  # fmt: skip
    gap = facts.gap
    if gap is None or not 0 < gap < math.inf or abs(math.log(gap)) < math.log(1.01):
        return f"{who} would change the loss, though hardly its gradient norm"
    return f"{who} would make the gradient about {times(gap)}"


def _reference_lines(facts: Facts, worst: Worst) -> list[str]:
    error = facts.coef_errors.get("reference")
    if error is None:
        return ["Whether TRL's own path is the configured loss is unavailable."]
    if "DS112" in worst:
        return [f"TRL's own path is off by {percent(error)} from the configured loss in float64: it is no yardstick."]
    return [f"TRL's own path is the configured loss: it agrees with float64 to {sig(error, 2)}."]


def _ratio_lines(facts: Facts, worst: Worst, settings: dict[str, Any]) -> list[str]:
    if facts.ratio_mean is None:
        return _engine_lines(facts)
    if "DS201" in worst:
        text = sentence(support_words(facts, settings))
        if facts.ratio_applied and facts.ratio_mean < 0.1:
            who = "and it is what trains" if facts.live == "reference" else "so switching to it alone is no cure"
            text += f". TRL's own path applies that ratio and hardly learns, {who}"
        return [text + ".", *_engine_lines(facts)]
    used = "applied" if facts.ratio_applied else "raw (not applied)"
    return [f"Mean importance sampling ratio, {used}: {sig(facts.ratio_mean)}.", *_engine_lines(facts)]


def _engine_lines(facts: Facts) -> list[str]:
    """What the canary says: the weights that the engine runs on, and what makes the ratio at the last look."""
    if facts.engine is None:
        return []
    lines = [canary_words(facts.engine)]
    parts = shares(facts.engine.last)
    if parts:
        lines.append(f"What makes the log ratio at step {facts.engine.last.step}: {', '.join(parts)}.")
    return lines
