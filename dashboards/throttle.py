"""Which alerts the console shows: the first of a rule in full, repeats rarely, a rise in severity at once.

Pure logic with an injected clock; nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from driftscope.records import SEVERITIES, AlertRecord

Showing = Literal["full", "repeat", "hide"]
FIRST_GAP = 10
LARGEST_GAP = 1000


@dataclass(frozen=True)
class Decision:
    """What to do with one alert.

    ``hidden``: alerts of the rule that were held back since it was last shown. ``last``: no further repeat of this
    rule will be shown.
    """

    show: Showing
    total: int = 0
    hidden: int = 0
    last: bool = False


@dataclass
class RuleCount:
    """What has been seen and shown of one rule."""

    severity: str
    first_step: int
    last_step: int
    shown_step: int
    shown_at: float
    total: int = 1
    shown: int = 1
    hidden: int = 0
    gap: int = FIRST_GAP


class AlertThrottle:
    """Decides for each alert whether it is shown.

    A repeat is shown when ``gap`` optimizer steps have passed since the rule was last shown; the gap grows from 10 to
    100 to 1000. ``min_interval_s`` seconds must have passed too. After ``max_per_rule`` lines a rule falls silent; a
    rise in severity is always shown, in full.
    """

    def __init__(self, *, min_interval_s: float = 0.0, max_per_rule: int = 20, clock: Callable[[], float]) -> None:
        self.min_interval_s = min_interval_s
        self.max_per_rule = max_per_rule
        self.rules: dict[str, RuleCount] = {}
        self._clock = clock

    def decide(self, alert: AlertRecord) -> Decision:
        """Count ``alert`` and say whether to show it."""
        now = self._clock()
        seen = self.rules.get(alert.rule)
        if seen is None:
            self.rules[alert.rule] = RuleCount(alert.severity, alert.step, alert.step, alert.step, now)
            return Decision("full", total=1)
        seen.total += 1
        seen.last_step = max(seen.last_step, alert.step)
        rises = SEVERITIES.index(alert.severity) > SEVERITIES.index(seen.severity)
        if rises:
            seen.severity, seen.gap = alert.severity, FIRST_GAP
            return self._shown(seen, alert, now, "full")
        due = alert.step - seen.shown_step >= seen.gap and now - seen.shown_at >= self.min_interval_s
        if not due or seen.shown >= self.max_per_rule:
            seen.hidden += 1
            return Decision("hide", total=seen.total, hidden=seen.hidden)
        seen.gap = min(seen.gap * 10, LARGEST_GAP)
        return self._shown(seen, alert, now, "repeat")

    def _shown(self, seen: RuleCount, alert: AlertRecord, now: float, show: Showing) -> Decision:
        decision = Decision(show, total=seen.total, hidden=seen.hidden, last=seen.shown + 1 >= self.max_per_rule)
        seen.shown_step, seen.shown_at, seen.hidden = alert.step, now, 0
        seen.shown += 1
        return decision
