"""The alerts of a run by rule, in memory that does not grow with their number."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from driftscope.reading.columns import STRETCHES, Stretches
from driftscope.reading.digest import StepSet
from driftscope.records import SEVERITIES, AlertRecord

Json = dict[str, Any]
SHOWN = 3
"""Alerts kept from either end of a rule's."""
MAX_RULES = 500
MAX_MARKED = 2000
MAX_PENDING = 4096
MARKED = "DS211"
"""Rule whose every alert is marked in a figure."""
_RANK = {severity: i for i, severity in enumerate(SEVERITIES)}


@dataclass
class RuleTally:
    """One rule's alerts, as JSON objects. ``worst``: the first of the worst; ``last_worst``: that of the latest step.

    ``by_stretch``: how many of each severity in each stretch of the run.
    """

    stretches: Stretches
    count: int = 0
    rank: int = -1
    worst: Json = field(default_factory=dict)
    last_worst: Json = field(default_factory=dict)
    first_step: int = 0
    last_step: int = 0
    steps: dict[int, StepSet] = field(default_factory=dict)
    """By process."""
    head: list[Json] = field(default_factory=list)
    tail: deque[Json] = field(default_factory=lambda: deque(maxlen=SHOWN))
    marked: list[Json] = field(default_factory=list)
    by_stretch: list[list[int]] = field(default_factory=lambda: [[0] * STRETCHES for _ in SEVERITIES])

    @property
    def severity(self) -> str:
        """That of the worst alert."""
        return SEVERITIES[max(self.rank, 0)]

    def add(self, alert: Json) -> None:
        """Take in the next alert."""
        step, process, rank = alert["step"], alert.get("rank", 0), _RANK[alert["severity"]]
        if not self.count:
            self.first_step = self.last_step = step
        elif step < self.first_step:
            self.first_step = step
        elif step > self.last_step:
            self.last_step = step
        self.count += 1
        if rank > self.rank:
            self.rank, self.worst, self.last_worst = rank, alert, alert
        elif rank == self.rank and step > self.last_worst["step"]:
            self.last_worst = alert
        known = self.steps.get(process)
        if known is None:
            known = self.steps[process] = StepSet()
        known.add(step)
        if len(self.head) < 2 * SHOWN:
            self.head.append(alert)
        self.tail.append(alert)
        if len(self.marked) < MAX_MARKED and alert["rule"] == MARKED:
            self.marked.append(alert)
        self.by_stretch[rank][self.stretches.of(step)] += 1

    def merge(self, other: RuleTally) -> None:
        """Take in the same rule's alerts of a later part of the run."""
        if not other.count:
            return
        self.first_step = min(self.first_step, other.first_step) if self.count else other.first_step
        self.last_step = max(self.last_step, other.last_step) if self.count else other.last_step
        self.count += other.count
        if other.rank > self.rank:
            self.rank, self.worst, self.last_worst = other.rank, other.worst, other.last_worst
        elif other.rank == self.rank and other.last_worst["step"] > self.last_worst["step"]:
            self.last_worst = other.last_worst
        for process, steps in other.steps.items():
            self.steps.setdefault(process, StepSet()).merge(steps)
        self.head = (self.head + other.head)[: 2 * SHOWN]
        self.tail.extend(other.tail)
        self.marked = (self.marked + other.marked)[:MAX_MARKED]
        for mine, theirs in zip(self.by_stretch, other.by_stretch, strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def widen(self) -> None:
        """Join the stretches two by two."""
        self.stretches = self.stretches.doubled()
        half = STRETCHES // 2
        for counts in self.by_stretch:
            counts[:] = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)] + [0] * half

    @property
    def distinct(self) -> int:
        """Number of (step, rank) with an alert."""
        return sum(map(len, self.steps.values()))

    def shown(self) -> list[Json]:
        """All alerts where they are few, else the first and the last ones."""
        return list(self.head) if self.count <= 2 * SHOWN else [*self.head[:SHOWN], *self.tail]


class Alerts:
    """The alerts on record, and those that the rules give for records that nobody had judged."""

    def __init__(self, stretches: Stretches | None = None) -> None:
        self.stretches = stretches or Stretches()
        self.rules: dict[str, RuleTally] = {}
        self.evaluated: dict[str, RuleTally] = {}
        self.left_out = 0
        self._pending: deque[Json] = deque()

    def add(self, alert: AlertRecord) -> None:
        """Take in an alert on record."""
        self.put(alert.model_dump(by_alias=True, warnings=False))

    def put(self, alert: Json) -> None:
        """Take in an alert on record, as a JSON object that is known to be sound."""
        rule = self.rules.get(alert["rule"])
        if rule is None:
            rule = self._new(self.rules, alert["rule"])
        rule.add(alert)

    def add_evaluated(self, alert: AlertRecord) -> None:
        """Take in what a rule says of an unjudged record; it counts where the journal does not hold that alert.

        The journal's may come later: the last ``MAX_PENDING`` are held back.
        """
        data = alert.model_dump(by_alias=True, warnings=False)
        if not self._known(data):
            self._pending.append(data)
            if len(self._pending) > MAX_PENDING:
                self._settle(self._pending.popleft())

    def _new(self, into: dict[str, RuleTally], name: str) -> RuleTally:
        if len(into) >= MAX_RULES:
            self.left_out += 1
            return RuleTally(self.stretches)
        return into.setdefault(name, RuleTally(self.stretches))

    def _known(self, alert: Json) -> bool:
        rule, process = self.rules.get(alert["rule"]), alert["rank"]
        return rule is not None and process in rule.steps and alert["step"] in rule.steps[process]

    def _settle(self, alert: Json) -> None:
        if not self._known(alert):
            self._new(self.evaluated, alert["rule"]).add(alert)

    def merge(self, other: Alerts) -> None:
        """Take in a later part of the run, cut into the same stretches."""
        self.left_out += other.left_out
        for mine, theirs in ((self.rules, other.rules), (self.evaluated, other.evaluated)):
            for name, rule in theirs.items():
                self._new(mine, name).merge(rule)
        self._pending.extend(other._pending)

    def widen(self) -> None:
        """Join the stretches two by two."""
        self.stretches = self.stretches.doubled()
        for rule in (*self.rules.values(), *self.evaluated.values()):
            rule.widen()

    def all(self) -> dict[str, RuleTally]:
        """By rule: the alerts on record, then those of unjudged records that are on no record."""
        out: dict[str, RuleTally] = {}
        last = Alerts(self.stretches)
        for alert in self._pending:
            if not self._known(alert):
                last.put(alert)
        for part in (self.rules, self.evaluated, last.rules):
            for name, rule in part.items():
                out.setdefault(name, RuleTally(self.stretches)).merge(rule)
        return out
