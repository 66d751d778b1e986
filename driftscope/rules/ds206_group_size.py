"""DS206: groups so small that many have no reward variance."""

from __future__ import annotations

from driftscope._text import percent
from driftscope.doctor.facts import Facts
from driftscope.rules._settings import grpo_settings
from driftscope.rules.base import Finding, Rule, Thresholds

BEST_WARNING = 0.25
"""Share of groups without variance at the best success rate that is a warning."""
HARD_RATE = 0.9
HARD_SHARE = 0.5
"""Share at a success rate of 0.9 (or 0.1) that is worth a note."""


def zero_variance(p: float, size: int) -> float:
    """Probability that all of ``size`` independent two-valued rewards with success rate ``p`` are equal."""
    return float(p**size + (1.0 - p) ** size)


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where a two-valued reward leaves many groups without an advantage, whatever its success rate."""
    settings = grpo_settings(facts)
    size = int(settings.get("num_generations", 0)) if settings is not None else 0
    if size < 2:  # TRL refuses it
        return None
    best, hard = zero_variance(0.5, size), zero_variance(HARD_RATE, size)
    if best < BEST_WARNING and hard < HARD_SHARE:
        return None
    enough = next(n for n in range(size + 1, 1000) if zero_variance(HARD_RATE, n) < HARD_SHARE)
    evidence = (
        f"num_generations={size}: with a reward of two values {percent(best)} of the groups have equal rewards at the "
        f"best success rate (0.5), {percent(hard)} at 0.9 or 0.1; an equal group has zero advantage and trains nothing"
    )
    remedy = (
        f"Set num_generations={max(enough, 8)} (with generation_batch_size a multiple of it), or use a reward with "
        "more than two values; watch frac_reward_zero_std."
    )
    return Finding("warning" if best >= BEST_WARNING else "info", RULE.title, evidence, remedy)


RULE = Rule(
    code="DS206",
    name="group-size",
    title="Groups are so small that many have no reward variance",
    group="sampling",
    why=(
        "The advantage of a completion is its reward less the mean of its group. With a right-or-wrong reward of "
        "success rate p all G completions of a prompt are right or all wrong with probability p^G + (1-p)^G, at least "
        "2^(1-G). Such a group is sampled, scored and thrown away; TRL reports the share as frac_reward_zero_std."
    ),
    condition=(
        "2^(1-num_generations) is at least 0.25 (warning: 2 or 3 generations), or 0.9^G + 0.1^G is at least 0.5 "
        "(info: up to 6). A reward with many values is not affected."
    ),
    remedy="Raise num_generations to 8 or more, or use a reward with more than two values.",
    source="doctor",
    predict=predict,
)
