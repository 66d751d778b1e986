"""The run on disk: ``run.json`` (what ran) and ``records.jsonl`` (one JSON object a line, append-only).

The file can be read while it is written. A torn last line is skipped with a note; damaged lines are skipped, counted
and named. NaN and infinity are written as ``null`` and their fields are named in a step's ``nonfinite``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from driftscope._journal_backlog import Backlog, Lost
from driftscope._journal_file import RecordsFile
from driftscope._journal_reader import INFO_NAME, RECORDS_NAME, Record, Run, iter_records, read_run, records_path
from driftscope._journal_start import claim, previous_run, resume, set_aside, unwritable
from driftscope._jsonable import drop_incomplete, to_jsonable
from driftscope._run_lock import RunLock
from driftscope.records import NoteRecord, RunInfo, StepRecord
from driftscope.thinning import Thinner

__all__ = [
    "JournalWriter",
    "Opened",
    "Record",
    "Run",
    "encode",
    "iter_records",
    "open_journal",
    "previous_run",
    "read_run",
    "records_path",
    "set_aside",
]

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
MAX_TOLD, MAX_NOTES = 10, 20
FULL = (errno.ENOSPC, errno.EDQUOT)
SAME_FILE = (*FULL, errno.EFBIG)  # trouble that another open of the file would not mend


class JournalWriter:
    """Writes one run's files. After construction it never raises: the first trouble is kept in ``failed``.

    What cannot be written is tried again, after 1 s and then less and less often, once a minute at last. Meanwhile the
    newest 4 MiB of lines wait in memory; what had to be dropped is named in a note record once there is room again.

    told: is given every trouble once, in words, at most ten in a run. lock: let go by ``rest`` and ``close``.
    Raises ``RunDirectoryError`` when the directory cannot be made or its records file cannot be appended to; a disk
    that is full at the moment is no such case.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        told: Callable[[str], None] | None = None,
        lock: RunLock | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.failed: str | None = None
        self._told, self._lock, self._clock = told, lock, clock
        self._pid, self._closed = os.getpid(), False
        self._thinner = Thinner()
        self._backlog, self._written = Backlog(), Lost()
        self._blocked, self._retry_at, self._wait = False, 0.0, FIRST_RETRY_S
        self._events: list[tuple[int, str]] = []
        self._step, self._times_told, self._notes = 0, 0, 0
        self._info: RunInfo | None = None
        self._info_due = False
        self._stream = RecordsFile(self.run_dir / RECORDS_NAME, self._happened, self._reclaim)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._stream.open()
        except OSError as error:
            if error.errno not in FULL or not self.run_dir.is_dir():
                raise unwritable(self.run_dir, error) from error
            self._block(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write_info(self, info: RunInfo) -> None:
        """Replace ``run.json`` in one step and sync it: a reader sees the old file or the new one."""
        if os.getpid() == self._pid:
            self._info = info
            self._put_info()

    def write(self, record: Record, *, fresh_alarm: bool = False) -> None:
        """Append one record. Where ``failed`` is unset it survives the end of this process once this has returned.

        Steps after the first hundred are thinned (``driftscope.thinning``); one with a fresh alarm is kept in full.
        """
        if self._closed or os.getpid() != self._pid:  # a forked child has no business in its parent's journal
            return
        self._step = record.step
        try:
            line = self._encoded(record, fresh_alarm)
        except Exception as error:  # noqa: BLE001 - the record is lost, the journal lives
            self._backlog.lost.add(record.step)
            self._fail(f"a {record.kind} record of step {record.step} could not be encoded", error)
        else:
            self._backlog.add(record.step, line)
        if self._clock() >= self._retry_at:
            self._drain()

    def _encoded(self, record: Record, fresh_alarm: bool) -> bytes:
        if isinstance(record, StepRecord):
            return _dumped(self._thinner.slim(record, encode(self._thinner.thin(record, fresh_alarm))))
        return _line(record)

    def rest(self) -> None:
        """Sync the records and leave the directory to other runs.

        A later ``write`` takes it up again, as long as no other run has begun there.
        """
        if self._closed or os.getpid() != self._pid:
            return
        if self._backlog or self._backlog.lost.count or self._events or self._info_due:
            self._drain(last=True)
        with contextlib.suppress(Exception):  # whatever the file is by now
            self._stream.sync()
        with contextlib.suppress(Exception):
            self._stream.leave()
        if self._lock is not None:
            self._lock.release()

    def close(self) -> None:
        """Try once more what could not be written, then close the files; further writes are ignored."""
        if self._closed or os.getpid() != self._pid:
            return
        self.rest()
        self._closed = True
        left = self._backlog.waiting()
        if left.count:
            self._tell(f"{left.words()} could not be written to {self.run_dir / RECORDS_NAME} and are lost.")
        with contextlib.suppress(OSError, ValueError):
            self._stream.close()

    def _drain(self, *, last: bool = False) -> None:
        """Write what waits, and then what there is to say about what could not be."""
        lost = self._backlog.lost.words()
        try:
            while self._backlog:
                self._append(self._backlog.first())
                self._written.add(self._backlog.done())
            while (note := self._next_note(last=last)) is not None:
                self._append(note)
                self._notes += 1
                if self._events:
                    self._events.pop(0)
                else:
                    self._backlog.lost = Lost()
        except (OSError, ValueError) as error:
            self._block(error)
            return
        if self._blocked:
            self._blocked, self._wait = False, FIRST_RETRY_S
            self._tell(f"{RECORDS_NAME} in {self.run_dir} can be written again; lost: {lost or 'nothing'}.")
        if self._info_due:
            self._put_info()

    def _append(self, line: bytes) -> None:
        self._stream.write(line)
        self._stream.flush()

    def _next_note(self, *, last: bool) -> bytes | None:
        """What there is to say about the file itself, or about records that are lost; the last word is never cut."""
        if self._notes >= MAX_NOTES and not (last and self._notes == MAX_NOTES):
            return None
        lost = self._backlog.lost
        if self._events:
            step, message = self._events[0]
        elif lost.count:
            step, message = lost.first, f"{lost.words()} could not be written and are lost ({self.failed})."
        else:
            return None
        try:
            return _line(NoteRecord(time=time.time(), step=step, stage="journal", message=message))
        except Exception:  # noqa: BLE001 - no record can be encoded, which has been told
            return None

    def _block(self, error: Exception) -> None:
        """Wait before the next try; another open is tried where it might help."""
        if getattr(error, "errno", None) not in SAME_FILE:
            with contextlib.suppress(OSError, ValueError):
                self._stream.close()
        self._retry_at = self._clock() + self._wait
        self._wait = min(2 * self._wait, LAST_RETRY_S)
        if not self._blocked:
            self._blocked = True
            self._fail(f"{RECORDS_NAME} could not be written, no further records are kept until it can be", error)

    def _happened(self, what: str) -> None:
        """Something was done to the file: say so, and write down what may be missing from it."""
        written, self._written = self._written.words(), Lost()
        gone = f": up to {written} are gone with it" if written else ""
        if len(self._events) < MAX_NOTES:
            self._events.append((self._step, f"{what}{gone}."))
        self._info_due = self._info is not None
        self.failed = self.failed or f"{what} in {self.run_dir}"
        self._tell(f"{what} in {self.run_dir}{gone}. The journal goes on.")

    def _reclaim(self) -> None:
        if self._lock is not None and not self._lock.acquire():
            raise BlockingIOError(errno.EAGAIN, f"{self.run_dir} is in use by {self._lock.owner()} now")

    def _put_info(self) -> None:
        assert self._info is not None
        target = self.run_dir / INFO_NAME
        partial = target.with_name(f".{INFO_NAME}.{os.getpid()}")
        self._info_due = False
        try:
            data, _ = to_jsonable(self._info.model_dump(by_alias=True, warnings=False))
            with partial.open("wb") as stream:
                stream.write(json.dumps(data, indent=2, allow_nan=False).encode() + b"\n")
                stream.flush()
                with contextlib.suppress(OSError):  # not every file system syncs
                    os.fsync(stream.fileno())
            partial.replace(target)
        except Exception as error:  # noqa: BLE001 - a journal never ends a run
            self._info_due = isinstance(error, OSError)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            self._fail(f"{INFO_NAME} could not be written", error)

    def _fail(self, what: str, error: Exception) -> None:
        """Keep the first trouble, tell each sort of it."""
        words = f"{what} in {self.run_dir}: {type(error).__name__}: {error}"
        self.failed = self.failed or words
        self._tell(words)

    def _tell(self, words: str) -> None:
        if self._told is not None and self._times_told < MAX_TOLD:
            self._times_told += 1
            with contextlib.suppress(Exception):  # telling must not fail either
                self._told(words)


@dataclass(frozen=True)
class Opened:
    """A journal that is ready. ``before``: the run that goes on in it, where its run.json could be read."""

    journal: JournalWriter
    before: RunInfo | None


def open_journal(run_dir: Path, *, resumed_at: int = 0, told: Callable[[str], None]) -> Opened:
    """Claim a directory for a run, set an earlier run aside or go on in it, and open the journal.

    resumed_at: the optimizer step of the checkpoint that the run goes on from, 0 for a new run. told: is given in
    words what the user should know, now and later. Where another live run holds ``run_dir`` the journal goes to the
    first free one of ``run_dir-2``, ``run_dir-3`` ... (see ``journal.run_dir``).

    Raises ``RunDirectoryError`` where nothing can be recorded.
    """
    own = claim(Path(run_dir))
    try:
        if own.lock.held:
            for stray in own.run_dir.glob(f".{INFO_NAME}.*"):  # of a process that was killed
                stray.unlink(missing_ok=True)
        before, gap = previous_run(own.run_dir), None
        if resumed_at > 0 and own.run_dir == Path(run_dir):
            gap = resume(own.run_dir, before, resumed_at, told)
        else:
            set_aside(own.run_dir, before)
            before = None
        journal = JournalWriter(own.run_dir, told=told, lock=own.lock)
    except OSError as error:
        own.lock.release()
        raise unwritable(own.run_dir, error) from error
    except BaseException:
        own.lock.release()
        raise
    if own.message is not None:
        told(own.message)
    if gap is not None:
        journal.write(NoteRecord(time=time.time(), step=gap.step, stage="journal", message=gap.message))
    return Opened(journal, before)


def encode(record: Record) -> dict[str, Any]:
    """A record as plain JSON types; a step's NaN and infinite fields become ``None``, named in ``nonfinite``."""
    data, nonfinite = to_jsonable(record.model_dump(by_alias=True, warnings=False))
    if isinstance(record, StepRecord):
        data["nonfinite"] = list(dict.fromkeys([*record.nonfinite, *nonfinite]))
        drop_incomplete(data)
    return data  # type: ignore[no-any-return]


def _line(record: Record) -> bytes:
    return _dumped(encode(record))


def _dumped(data: dict[str, Any]) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
