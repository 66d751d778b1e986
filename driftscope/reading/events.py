"""What happened in a run, as sums over its records: causes, limits crossed, troubles, episodes, pooled bins.

Each is filled in file order from records as plain JSON objects, and can take in a later part of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from driftscope.reading.digest import Digest
from driftscope.rules.base import finite

Json = dict[str, Any]
MAX_KEYS = 500
"""Distinct texts (reasons, limits, causes) that are kept; only a foreign file has more."""
MAX_EPISODES = 4000
MAX_RANKS = 100_000
NONFINITE = "Not a finite number (NaN or infinite)."


@dataclass
class CauseTally:
    """One cause of the gap over the run. ``seen``: records that name it."""

    factors: Digest = field(default_factory=Digest)
    shares: Digest = field(default_factory=Digest)
    seen: int = 0
    detail: str | None = None

    def medians(self, absent: int) -> tuple[float | None, float | None]:
        """Median factor and share, where ``absent`` further records count as a factor of 1 and a share of 0.

        A factor that was never known stays unknown.
        """
        factors, shares = Digest(), Digest()
        factors.merge(self.factors)
        shares.merge(self.shares)
        if factors.count:
            factors.repeat(1.0, absent)
        shares.repeat(0.0, absent)
        return factors.median(), shares.median()


@dataclass
class Causes:
    """The causes of all records that attribute their gap; ``unexplained`` is one of them."""

    rows: dict[str, CauseTally] = field(default_factory=dict)
    attributed: int = 0

    def add(self, record: Json) -> None:
        """Take in one record."""
        causes, unexplained = record.get("causes") or (), record.get("unexplained")
        if not causes and unexplained is None:
            return
        self.attributed += 1
        for cause in causes:
            self._add(cause["id"], cause.get("factor"), cause.get("share"), cause.get("detail"))
        if unexplained is not None:
            self._add("unexplained", unexplained.get("factor"), unexplained.get("share"), None)

    def _add(self, name: str, factor: float | None, share: float | None, detail: str | None) -> None:
        row = self.rows.get(name)
        if row is None:
            if len(self.rows) >= MAX_KEYS:
                return
            row = self.rows[name] = CauseTally()
        row.seen += 1
        row.detail = detail or row.detail
        if (known := finite(factor)) is not None and known > 0:
            row.factors.add(known)
        if (known := finite(share)) is not None:
            row.shares.add(known)

    def merge(self, other: Causes) -> None:
        """Take in a later part of the run."""
        self.attributed += other.attributed
        for name, theirs in other.rows.items():
            mine = self.rows.setdefault(name, CauseTally())
            mine.factors.merge(theirs.factors)
            mine.shares.merge(theirs.shares)
            mine.seen += theirs.seen
            mine.detail = theirs.detail or mine.detail


@dataclass
class LimitTally:
    """One limit of the threshold profile: how often it was crossed, and the furthest value."""

    worst: Json
    seen: int = 0
    first: int = 0
    last: int = 0


@dataclass
class Limits:
    """The limits that were crossed."""

    rows: dict[str, LimitTally] = field(default_factory=dict)

    def add(self, record: Json) -> None:
        """Take in one record."""
        for crossed in record.get("violations") or ():
            row = self.rows.get(crossed["limit"])
            if row is None:
                if len(self.rows) >= MAX_KEYS:
                    return
                row = self.rows[crossed["limit"]] = LimitTally(crossed, 0, record["step"], record["step"])
            self._put(row, crossed, 1, record["step"], record["step"])

    @staticmethod
    def _put(row: LimitTally, worst: Json, seen: int, first: int, last: int) -> None:
        row.seen += seen
        row.first, row.last = min(row.first, first), max(row.last, last)
        if abs(worst["value"] - worst["allowed"]) > abs(row.worst["value"] - row.worst["allowed"]):
            row.worst = worst

    def merge(self, other: Limits) -> None:
        """Take in a later part of the run."""
        for name, theirs in other.rows.items():
            if name in self.rows:
                self._put(self.rows[name], theirs.worst, theirs.seen, theirs.first, theirs.last)
            else:
                self.rows[name] = theirs


@dataclass
class Troubles:
    """What could not be had or was not finite: (where, what) -> [times, first step, last step]."""

    seen: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    left_out: int = 0
    latest: dict[str, int] = field(default_factory=dict)
    """Signal -> place of the latest record that says why it is unavailable."""

    def add_record(self, unavailable: dict[str, str] | None, nonfinite: list[str] | None, step: int) -> None:
        """Take in what one record says."""
        for signal in sorted(unavailable or ()):
            self.add(signal, "Unavailable: " + (unavailable or {})[signal], step)
        for name in nonfinite or ():
            self.add(name, NONFINITE, step)

    def add(self, where: str, what: str, step: int) -> None:
        """Take in one sighting."""
        self._put((where, what), [1, step, step])

    def _put(self, key: tuple[str, str], found: list[int]) -> None:
        known = self.seen.get(key)
        if known is None:
            if len(self.seen) >= MAX_KEYS:
                self.left_out += 1
                return
            self.seen[key] = list(found)
        else:
            known[0] += found[0]
            known[1], known[2] = min(known[1], found[1]), max(known[2], found[2])

    def merge(self, other: Troubles) -> None:
        """Take in a later part of the run."""
        self.left_out += other.left_out
        for key, found in other.seen.items():
            self._put(key, found)
        self.latest |= other.latest


@dataclass
class Watch:
    """Episodes ``[started, found, last, kind]`` and stretches of warm-up ``[first, last]`` of one watched series."""

    episodes: list[list[Any]] = field(default_factory=list)
    warm: list[list[int]] = field(default_factory=list)
    state: str | None = None
    begins: str | None = None
    found: int = 0
    """Episodes in all, those over ``MAX_EPISODES`` included."""

    def add(self, seen: Json, step: int) -> None:
        """Take in the series at one record."""
        state = seen.get("state", "warm-up")
        if state == "alarm":
            kind = seen.get("kind")
            if self.state == "alarm":
                last = self.episodes[-1]
                last[2], last[3] = step, kind or last[3]
            else:
                started = seen.get("started")
                self._open([min(started, step) if started is not None else step, step, step, kind])
        elif state == "warm-up":
            if self.state == "warm-up":
                self.warm[-1][1] = step
            elif len(self.warm) < MAX_EPISODES:
                self.warm.append([step, step])
            else:
                self.warm[-1] = [step, step]
        self.begins = self.begins or state
        self.state = state

    def _open(self, episode: list[Any]) -> None:
        self.found += 1
        if len(self.episodes) < MAX_EPISODES:
            self.episodes.append(episode)
        else:
            self.episodes[-1] = episode

    def merge(self, other: Watch) -> None:
        """Take in a later part of the run."""
        episodes, warm = other.episodes, other.warm
        self.found += other.found
        if self.state == other.begins == "alarm":
            mine, theirs = self.episodes[-1], episodes[0]
            mine[2], mine[3] = theirs[2], theirs[3] or mine[3]
            episodes, self.found = episodes[1:], self.found - 1
        if self.state == other.begins == "warm-up":
            self.warm[-1][1] = warm[0][1]
            warm = warm[1:]
        self.episodes = (self.episodes + episodes)[:MAX_EPISODES]
        self.warm = (self.warm + warm)[:MAX_EPISODES]
        self.begins = self.begins or other.begins
        self.state = other.state or self.state


Edges = tuple[float, float | None]


@dataclass
class Bins:
    """The mismatch in bins, pooled: edges -> [tokens, sum of d, of |d|, of d squared]."""

    rows: dict[Edges, list[float]] = field(default_factory=dict)
    records: int = 0

    def add(self, bins: list[Json]) -> None:
        """Take in the bins of one record; one without figures counts for nothing but its edges."""
        self.records += 1
        for row in bins:
            edges = (row["low"], row.get("high"))
            pool = self.rows.get(edges)
            if pool is None:
                if len(self.rows) >= MAX_KEYS:
                    return
                pool = self.rows[edges] = [0, 0.0, 0.0, 0.0]
            count, mean, size = row.get("count", 0), finite(row.get("mean")), finite(row.get("abs_mean"))
            if mean is None or size is None or count <= 0:
                continue
            spread = finite(row.get("std")) or 0.0
            pool[0] += count
            pool[1] += count * mean
            pool[2] += count * size
            pool[3] += count * (spread * spread + mean * mean)

    def merge(self, other: Bins) -> None:
        """Take in a later part of the run."""
        self.records += other.records
        for edges, theirs in other.rows.items():
            mine = self.rows.setdefault(edges, [0, 0.0, 0.0, 0.0])
            for i, value in enumerate(theirs):
                mine[i] += value


@dataclass
class Disagreement:
    """One thing that ranks disagree on: how often, when, and on which ranks at last."""

    seen: int
    first: int
    last: int
    ranks: list[int]


@dataclass
class Ranks:
    """What the records of several processes have in common."""

    records: int = 0
    slowest: Counter[int] = field(default_factory=Counter)
    missing: set[int] = field(default_factory=set)
    disagree: dict[str, Disagreement] = field(default_factory=dict)

    def add(self, ranks: Json, step: int) -> None:
        """Take in what one record says of its ranks; of one process it says nothing."""
        if ranks["processes"] < 2:
            return
        self.records += 1
        if ranks.get("slowest") is not None and (len(self.slowest) < MAX_RANKS or ranks["slowest"] in self.slowest):
            self.slowest[ranks["slowest"]] += 1
        if ranks.get("missing") and len(self.missing) < MAX_RANKS:
            self.missing.update(ranks["missing"])
        for what, where in (ranks.get("disagree") or {}).items():
            known = self.disagree.get(what)
            if known is not None:
                known.seen, known.last, known.ranks = known.seen + 1, step, where
            elif len(self.disagree) < MAX_KEYS:
                self.disagree[what] = Disagreement(1, step, step, where)

    def merge(self, other: Ranks) -> None:
        """Take in a later part of the run."""
        self.records += other.records
        self.slowest.update(other.slowest)
        self.missing |= other.missing
        for what, theirs in other.disagree.items():
            mine = self.disagree.get(what)
            if mine is None:
                self.disagree[what] = theirs
            else:
                mine.seen, mine.last, mine.ranks = mine.seen + theirs.seen, theirs.last, theirs.ranks


def log_size(ratio: float) -> float:
    """How far a ratio is from 1, in either direction; infinite at zero and infinity."""
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf
