"""DS501: one rank is slower than the others, step after step."""

from __future__ import annotations

from driftscope._text import sig, times
from driftscope.records import StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on analysed steps where the slowest rank's usual own time is far over the other ranks' median."""
    ranks = record.ranks
    if ranks is None or record.tier == "light" or ranks.slowest is None:
        return None
    slow, usual = finite(ranks.slowest_ms), finite(ranks.median_ms)
    if slow is None or not usual or slow / usual < thresholds.straggler:
        return None
    evidence = (
        f"rank {ranks.slowest} of {ranks.processes} needs {sig(slow)} ms for its own forward passes of a step, the "
        f"others {sig(usual)} ms ({times(slow / usual)}; medians over the last steps)"
    )
    return Finding("warning", f"Rank {ranks.slowest} holds the others up", evidence, RULE.remedy)


RULE = Rule(
    code="DS501",
    name="straggler",
    title="One rank holds the others up",
    group="ranks",
    why=(
        "Every step ends in collectives, so the slowest rank sets the pace and the time of all others is lost in "
        "waiting; it shows in no rank's step time, because all of them wait. What tells is the time of a rank's own "
        "work: here that of its forward passes of the backbone, in which it waits for nobody under DDP and ZeRO-1 "
        "and 2 (under FSDP and ZeRO-3 gathering the weights is in it)."
    ),
    condition=(
        "The median, over the last 20 steps, of the slowest rank's own time is 1.5 times the other ranks' median or "
        "more. Single long completions average out."
    ),
    remedy=(
        "Look at that rank's GPU first (nvidia-smi: clocks, temperature, other processes on it), then at its share of "
        "the data: with uneven completion lengths, shuffle prompts over ranks or group them by length."
    ),
    check=check,
)
