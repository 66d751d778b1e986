"""One part of a journal summed up, line by line: what a verdict and a report of a run of any size are made of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from driftscope._journal_reader import Record, Skipped, UnknownKindError, parse_line
from driftscope._jsonable import LARGEST
from driftscope._run_facts import FactsTally
from driftscope._verdict_engine import EngineTally
from driftscope.reading.alerts import MARKED, MAX_MARKED, Alerts
from driftscope.reading.columns import Columns, Stretches
from driftscope.reading.digest import StepSet
from driftscope.reading.events import Bins, Causes, Limits, Ranks, Troubles, Watch
from driftscope.reading.layout import ANALYSED, add_figures
from driftscope.reading.unjudged import Unjudged
from driftscope.records import SCHEMA_VERSION, SEVERITIES, AlertRecord, NoteRecord, RunInfo, StepRecord

Json = dict[str, Any]
LATEST = 10
MAX_NOTES = 1000
MAX_NAMES = 64
_TIERS = frozenset({"light", "spectrum", "deep"})


@dataclass
class PathTally:
    """What is known of one loss path besides its figures."""

    sources: set[str] = field(default_factory=set)
    note: str | None = None
    cost_note: str | None = None
    trains_deep: bool = False


@dataclass
class Marks:
    """Where the records stand that a report shows whatever their figures are."""

    first: int | None = None
    windows: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))
    last: dict[str, deque[int]] = field(default_factory=dict)
    """Of each sort the places of the latest windows that have it."""
    looks: list[int] = field(default_factory=list)
    """The first look of the canary, and those around the first changes of its answer."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Rule -> the window of its first alert."""
    marked: list[int] = field(default_factory=list)
    """The windows of the alerts that a figure marks one by one."""
    answer: Any = None
    look: int | None = None

    def begin(self, place: int) -> None:
        """Remember a window among the first and latest of all."""
        if self.first is None:
            self.first = place
        self.windows.append(place)

    def latest(self, sort: str, place: int) -> None:
        """Remember a window among the latest of its sort."""
        known = self.last.setdefault(sort, deque(maxlen=LATEST))
        if not known or known[-1] != place:
            known.append(place)

    def alarm(self, rule: str, place: int) -> None:
        """Remember the window of an alert: the first one of its rule, and the latest."""
        self.alarms.setdefault(rule, place)
        self.latest(f"alarm {rule}", place)
        if rule == MARKED and len(self.marked) < MAX_MARKED:
            self.marked.append(place)

    def looked(self, look: Json, place: int) -> None:
        """Remember a look of the canary."""
        answer = (look.get("agrees_with", "current"), tuple(look.get("stale_modules") or ()))
        if self.look is None:
            self.looks.append(place)
        elif answer != self.answer and len(self.looks) < MAX_NAMES:
            self.looks += [self.look, place]
        self.answer, self.look = answer, place

    def merge(self, other: Marks) -> None:
        """Take in a later part of the run; a change of the answer just at the seam is not seen."""
        self.first = self.first if self.first is not None else other.first
        self.windows.extend(other.windows)
        for sort, places in other.last.items():
            for place in places:
                self.latest(sort, place)
        self.looks = (self.looks + other.looks)[:MAX_NAMES]
        self.marked = (self.marked + other.marked)[:MAX_MARKED]
        self.alarms = other.alarms | self.alarms
        if other.look is not None:
            self.answer, self.look = other.answer, other.look

    def in_detail(self) -> set[int]:
        """The windows that are shown with everything they hold."""
        sorts = [places for sort, places in self.last.items() if not sort.startswith("alarm ")]
        out = {p for places in sorts for p in places} | set(self.looks) | set(self.windows)
        return out | ({self.first} if self.first is not None else set())

    def alarmed(self) -> set[int]:
        """The windows that are shown because of an alert."""
        sorts = [places for sort, places in self.last.items() if sort.startswith("alarm ")]
        return {p for places in sorts for p in places} | set(self.alarms.values()) | set(self.marked)


class Fold:
    """The sums over a part of a journal. Feed it lines in order with ``add``; ``merge`` takes in a later part."""

    def __init__(self, path: Any, info: RunInfo | None, stretches: Stretches) -> None:
        self.path, self.stretches = path, stretches
        self.skipped = Skipped()
        self.lines = 0
        self.found = False
        self.failed: tuple[int, str] | None = None
        self.records = 0
        self.steps = StepSet()
        self.ranks: set[int] = set()
        self.alerts = Alerts(stretches)
        self.notes: list[NoteRecord] = []
        self.notes_left_out = 0
        self.columns = Columns(stretches)
        self.facts = FactsTally()
        self.engine = EngineTally()
        self.causes = Causes()
        self.limits = Limits()
        self.processes = Ranks()
        self.troubles = Troubles()
        self.watched: dict[str, Watch] = {}
        self.bins = {name: Bins() for name in ("by_probability", "by_octave", "by_decile")}
        self.mismatches = 0
        self.paths: dict[str, PathTally] = {}
        self.live: set[str] = set()
        self.marks = Marks()
        self._unjudged = Unjudged(info, self.alerts)
        self._window: tuple[int | None, int] = (None, 0)

    def add(self, line: bytes, complete: bool, place: int) -> None:
        """Take in the line that begins at byte ``place``. Raises ``RecordError`` for an unknown schema version."""
        self.lines += 1
        try:
            data = from_json(line, allow_inf_nan=False)
        except ValueError:
            data = None
        try:
            if type(data) is dict and data.get("schema") == SCHEMA_VERSION and type(data["schema"]) is int:
                kind = data.get("kind")
                if kind == "step" and sound(data):
                    self._add_step(data, place)
                    self.found = True
                    return
                if kind == "alert" and sound_alert(data):
                    self._add_alert(data)
                    self.found = True
                    return
            self._add_strictly(parse_line(line, self.path, self.lines), place)
            self.found = True
        except UnknownKindError as error:
            self.skipped.name_unknown(str(error), self.lines)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            if complete:
                self.skipped.name_damaged(self.lines)
            else:
                self.skipped.torn = self.lines

    def _add_strictly(self, record: Record, place: int) -> None:
        """Take in a record that was read with every check there is."""
        if isinstance(record, StepRecord):
            self._add_step(record.model_dump(by_alias=True, warnings=False), place)
        elif isinstance(record, AlertRecord):
            self._add_alert(record.model_dump(by_alias=True, warnings=False))
        elif len(self.notes) < MAX_NOTES:
            self.notes.append(record)
        else:
            self.notes_left_out += 1

    def _add_alert(self, alert: Json) -> None:
        self.alerts.put(alert)
        if self._window[0] is not None:
            self.marks.alarm(alert["rule"], self._window[1])

    def _add_step(self, record: Json, place: int) -> None:
        step = record["step"]
        if step == self._window[0]:
            place = self._window[1]
        else:
            self._window = (step, place)
            self.steps.add(step)
            self.marks.begin(place)
        self.records += 1
        analysed = record.get("tier", "spectrum") != "light" or any(map(record.get, ANALYSED))
        add_figures(self.columns, record, place, analysed)
        live, rank = record["live"], record.get("rank", 0)
        if (live not in self.live and len(self.live) < MAX_NAMES) or rank not in self.ranks:
            self.live.add(live)
            self.ranks.add(rank)
        for name, seen in (record.get("drift") or {}).items():
            watch = self.watched.get(name)
            if watch is None:
                if len(self.watched) >= MAX_NAMES:
                    continue
                watch = self.watched[name] = Watch()
            if watch.state != "quiet" or seen.get("state") != "quiet":
                watch.add(seen, step)
        if record.get("unavailable") or record.get("nonfinite"):
            self._add_troubles(record, place)
        if (ranks := record.get("ranks")) is not None:
            self.processes.add(ranks, step)
        self._add_paths(record)
        if analysed:
            self._add_analysis(record, place)
        if not record.get("judged"):
            self._unjudged.evaluate(StepRecord.model_validate(record))

    def _add_troubles(self, record: Json, place: int) -> None:
        self.troubles.add_record(record.get("unavailable"), record.get("nonfinite"), record["step"])
        for signal in record.get("unavailable") or ():
            if signal in self.troubles.latest or len(self.troubles.latest) < MAX_NAMES:
                self.troubles.latest[signal] = place

    def _add_analysis(self, record: Json, place: int) -> None:
        self.facts.add(record)
        self.engine.add(record)
        self.causes.add(record)
        self.limits.add(record)
        marks = self.marks
        marks.latest("analysis", place)
        for sort in ("scatter", "gradient", "ranks", "profile"):
            if record.get(sort):
                marks.latest(sort, place)
        if (record.get("is_ratio") or {}).get("causes"):
            marks.latest("ratio causes", place)
        if (look := record.get("canary")) is not None:
            marks.looked(look, place)
            marks.latest("look", place)
        if (mismatch := record.get("mismatch")) is not None:
            self.mismatches += 1
            for name, bins in self.bins.items():
                if mismatch.get(name):
                    bins.add(mismatch[name])
            if mismatch.get("histogram"):
                marks.latest("histogram", place)
        for name, cost in (record.get("profile") or {}).items():
            if (known := self._path(name)) is not None:
                known.cost_note = known.cost_note or cost.get("note")
                known.trains_deep = known.trains_deep or record["live"] == name

    def _add_paths(self, record: Json) -> None:
        for name, path in (record.get("paths") or {}).items():
            if (known := self._path(name)) is not None:
                known.sources.add(path.get("source", "algebra"))
                if "note" in path:
                    known.note = path["note"] or known.note

    def _path(self, name: str) -> PathTally | None:
        known = self.paths.get(name)
        if known is None and len(self.paths) < MAX_NAMES:
            known = self.paths[name] = PathTally()
        return known

    def watch_unjudged(self, info: RunInfo | None) -> None:
        """Evaluate the rules on unjudged records with the thresholds of that run."""
        self._unjudged = Unjudged(info, self.alerts)

    def reach(self, step: int) -> None:
        """Join stretches two by two until the run as it is cut reaches ``step``."""
        while not self.stretches.reaches(step):
            self.stretches = self.stretches.doubled()
            self.columns.widen()
            self.alerts.widen()

    def merge(self, other: Fold) -> None:
        """Take in the part of the journal that follows."""
        self.skipped.merge(other.skipped, self.lines)
        if self.failed is None and other.failed is not None:
            number, why = other.failed
            self.failed = (number + self.lines, why.replace(f"line {number}:", f"line {number + self.lines}:", 1))
        self.lines += other.lines
        self.found = self.found or other.found
        self.records += other.records
        self.ranks |= other.ranks
        self.notes_left_out += other.notes_left_out + max(0, len(self.notes) + len(other.notes) - MAX_NOTES)
        self.notes = (self.notes + other.notes)[:MAX_NOTES]
        self.mismatches += other.mismatches
        self.live |= other.live
        for name in ("steps", "alerts", "columns", "facts", "engine", "causes", "limits", "processes", "troubles",
                     "marks"):  # fmt: skip
            getattr(self, name).merge(getattr(other, name))
        for series, watch in other.watched.items():
            self.watched.setdefault(series, Watch()).merge(watch)
        for name, bins in other.bins.items():
            self.bins[name].merge(bins)
        for name, path in other.paths.items():
            known = self.paths.setdefault(name, PathTally())
            known.sources |= path.sources
            known.note = path.note or known.note
            known.cost_note = known.cost_note or path.cost_note
            known.trains_deep = known.trains_deep or path.trains_deep
        if other._window[0] is not None:
            self._window = other._window


def whole(number: Any) -> bool:
    """Whether it is an integer of 64 bits."""
    return type(number) is int and -LARGEST <= number < LARGEST


def sound_alert(alert: Json) -> bool:
    """Whether an alert has all its parts, of the right type."""
    return (
        whole(alert.get("step"))
        and whole(alert.get("rank", 0))
        and alert.get("severity") in SEVERITIES
        and type(alert.get("rule")) is type(alert.get("title")) is str
        and type(alert.get("evidence")) is type(alert.get("remedy")) is str
    )


def sound(record: Json) -> bool:
    """Whether a step record has what every reader relies on, of the right type, and no share that is missing."""
    paths = record.get("paths", _NOTHING)
    if not (
        whole(record.get("step"))
        and whole(record.get("micro_step"))
        and type(record.get("live")) is str
        and record.get("tier", "spectrum") in _TIERS
        and whole(record.get("rank", 0))
        and type(paths) is dict
    ):
        return False
    if record.get("tier") == "light":
        return True
    for holder in (record, record.get("is_ratio") or _NOTHING):
        for cause in holder.get("causes") or ():
            if cause.get("share") is None:
                return False
    unexplained = record.get("unexplained")
    return unexplained is None or unexplained.get("share") is not None


_NOTHING: Json = {}
