"""A run of any size in bounded memory: what a verdict and a report are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from driftscope._journal_reader import INFO_NAME, Run, nothing_readable, parse_line, read_info, read_run, records_path
from driftscope._run_facts import Facts
from driftscope._verdict_engine import sampling_line
from driftscope.errors import RecordError
from driftscope.reading.alerts import Alerts
from driftscope.reading.digest import Digest
from driftscope.reading.fold import Fold
from driftscope.reading.scan import BUFFER, fold_file, lines, lines_from_end
from driftscope.records import AlertRecord, NoteRecord, RunInfo, StepRecord

BULKY = ("scatter", "mismatch", "head", "violations", "profile", "gradient")
"""Parts of a record that are read only where the record is shown in detail."""
MAX_WINDOW = 4096
STREAM_BYTES = 32 * 2**20
"""A journal of at least this size is summed up instead of held in memory."""


@dataclass(frozen=True)
class Summary:
    """A run as ``summarise`` read it. Counts, extremes and alert counts are exact.

    Medians are exact up to 4096 values, beyond within a relative 0.05%. ``problems`` says in words what could not be
    read. ``whole`` holds the sums themselves.
    """

    path: Path
    info: RunInfo | None
    problems: list[str]
    whole: Fold

    @property
    def records(self) -> int:
        """Step records: analysed micro-batches, and the last one of each other window."""
        return self.whole.records

    @property
    def steps(self) -> int:
        """Optimizer steps with a record."""
        return len(self.whole.steps)

    @property
    def notes(self) -> list[NoteRecord]:
        """The notes; of very many, the first thousand."""
        return self.whole.notes

    @property
    def alerts(self) -> Alerts:
        """The alerts by rule."""
        return self.whole.alerts

    @cached_property
    def facts(self) -> Facts | None:
        """The run in a few medians, or ``None`` where nothing was measured."""
        return self.whole.facts.facts()

    @cached_property
    def sampling(self) -> str | None:
        """The latest importance sampling ratio and what makes it."""
        return sampling_line(self.whole.engine.engine())

    @cached_property
    def figures(self) -> dict[str, Digest]:
        """Every figure by the path of its field: ``figures["gap.grad_norm_ratio"].median()``.

        ``overhead_ms`` counts the records that have a ``step_ms``, so that the sums of both make a share.
        """
        self.whole.columns.flush()
        return {name: column.digest for name, column in self.whole.columns.by_name.items()}

    def kept(self) -> list[StepRecord]:
        """The records that a report shows, in the order of the file: few of a long run, all of a short one.

        Of every figure that is drawn the lowest and the highest value in each stretch of the run, the first and last
        alerts of each rule, the latest analysed windows; always whole windows. Only the latest windows, and those kept
        for what they hold besides figures, come with scatter, mismatch and the like.
        """
        marks = self.whole.marks
        detailed = marks.in_detail() | set(self.whole.troubles.latest.values())
        places = detailed | marks.alarmed() | self.whole.columns.places()
        out: list[StepRecord] = []
        with self.path.open("rb", buffering=BUFFER // 16) as stream:
            for place in sorted(places):
                out += _window(stream, place, self.path, in_detail=place in detailed)
        return out

    def kept_alerts(self) -> list[AlertRecord]:
        """The first and last alerts of each rule, and each one that a figure marks."""
        rules = self.whole.alerts.rules.values()
        return [AlertRecord.model_validate(a) for rule in rules for a in (rule.marked or rule.shown())]


def read_any(path: Path | str) -> Run | Summary:
    """A run read whole where its journal is small, else summed up. Raises ``RecordError`` as ``summarise`` does."""
    file = records_path(Path(path))
    try:
        size = file.stat().st_size
    except OSError:
        size = 0  # read_run says why
    return read_run(file) if size < STREAM_BYTES else summarise(file)


def last_steps(path: Path | str, limit: int) -> list[StepRecord]:
    """The last step records of a run, at most ``limit``, in the order of the file; read from its end.

    Lines that cannot be read are passed over. Raises ``RecordError`` where the file is missing or cannot be read.
    """
    file = records_path(Path(path))
    found: list[StepRecord] = []
    try:
        with file.open("rb") as stream:
            for line in lines_from_end(stream):
                if len(found) >= limit:
                    break
                record = _read(line, file, in_detail=True)
                if record is not None:
                    found.append(record)
    except OSError as error:
        why = error.strerror or str(error)
        raise RecordError(f"{file} cannot be read ({why}). Check the path and its permissions.") from error
    return found[::-1]


def summarise(path: Path | str, processes: int | None = None, *, cached: bool = True) -> Summary:
    """Read a run of any size, from its directory or its records file, in bounded memory.

    processes: that read side by side; by default one a core, four at most, for 64 MiB and more.
    cached: what an earlier reader kept of a journal of that size in ``records.summary`` is used where it is still
    right, and kept for the next one.
    Raises ``RecordError`` for records that are missing, unreadable, empty, foreign or of an unknown schema version.
    """
    file = records_path(Path(path))
    problems: list[str] = []
    info = read_info(file.with_name(INFO_NAME), problems)
    try:
        size = file.stat().st_size
        whole = fold_file(file, info, processes, cached=cached)
    except OSError as error:
        why = error.strerror or str(error)
        raise RecordError(f"{file} cannot be read ({why}). Check the path and its permissions.") from error
    if whole.failed is not None:
        raise RecordError(whole.failed[1])
    if not whole.found and not whole.skipped.unknown:
        raise RecordError(nothing_readable(file, size, whole.skipped))
    problems += whole.skipped.describe()
    if whole.notes_left_out:
        problems.append(f"{whole.notes_left_out} further notes are left out.")
    return Summary(path=file, info=info, problems=problems, whole=whole)


def _window(stream: Any, place: int, path: Path, *, in_detail: bool) -> list[StepRecord]:
    """The records of the window that begins there."""
    out: list[StepRecord] = []
    for _, line, _ in lines(stream, place, place + 2**62):
        if len(out) >= MAX_WINDOW:
            break
        record = _read(line, path, in_detail=in_detail)
        if record is None:
            continue
        if out and record.step != out[0].step:
            break
        out.append(record)
    return out


def _read(line: bytes, path: Path, *, in_detail: bool) -> StepRecord | None:
    try:
        data = from_json(line, allow_inf_nan=False)
        if data["kind"] != "step":
            return None
        if not in_detail:
            return StepRecord.model_validate({k: v for k, v in data.items() if k not in BULKY})
    except (ValueError, TypeError, KeyError):
        data = None
    try:
        record = parse_line(line, path, 0)
    except Exception:  # noqa: BLE001 - a line that was readable before, or one that was counted as damaged
        return None
    return record if isinstance(record, StepRecord) else None
