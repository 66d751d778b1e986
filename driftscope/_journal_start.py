"""Where a run's records begin: the directory is claimed, an earlier run set aside, a resumed run continued.

A run that goes on from a checkpoint of step S records the steps after S again. What the journal holds of them already
is moved to a file beside it first, so that every step stands in the records once.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from driftscope._journal_reader import INFO_NAME, MAX_LINE_BYTES, RECORDS_NAME
from driftscope._run_lock import RunLock
from driftscope.errors import RunDirectoryError
from driftscope.records import RunInfo

MAX_SIBLINGS = 100
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Claim:
    """A run directory that this process may write to. ``message``: what the user should know about it."""

    run_dir: Path
    lock: RunLock
    message: str | None = None


@dataclass(frozen=True)
class Continued:
    """How a resumed run finds its journal.

    last: last step on record that stays, ``None`` without records. moved: lines set aside. aside: the file for them.
    """

    last: int | None = None
    moved: int = 0
    aside: Path | None = None


def claim(run_dir: Path) -> Claim:
    """Lock ``run_dir``, or the first of ``run_dir-2``, ``run_dir-3`` ... that no live run holds.

    Raises ``RunDirectoryError`` where none can be made.
    """
    message = None
    for number in range(1, MAX_SIBLINGS):
        directory = run_dir if number == 1 else run_dir.with_name(f"{run_dir.name}-{number}")
        lock = RunLock(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            taken = lock.acquire()
        except OSError as error:
            raise unwritable(directory, error, message) from error
        if taken:
            if message is not None:
                message = f"{message} This run's records go to {directory}."
            elif lock.unsupported is not None:
                message = (
                    f"The file system of {directory} gives no lock ({lock.unsupported}): nothing keeps a second run "
                    "out of this directory. Give every run its own run_dir."
                )
            return Claim(directory, lock, message)
        message = message or f"{run_dir} is in use by {lock.owner()}."
    raise RunDirectoryError(f"{run_dir} and {MAX_SIBLINGS - 2} directories beside it are in use by other runs.")


def unwritable(run_dir: Path, error: OSError, before: str | None = None) -> RunDirectoryError:
    """The error of a run directory that cannot be written to."""
    return RunDirectoryError(
        (f"{before} " if before else "")
        + f"run_dir={str(run_dir)!r} cannot be written ({error.strerror or error}): Driftscope appends its "
        f"records to {RECORDS_NAME} there. Choose a directory that this process may write to."
    )


def previous_run(run_dir: Path) -> RunInfo | None:
    """The run that ``run_dir`` holds, or ``None`` where there is none or its run.json cannot be read."""
    try:
        return RunInfo.model_validate_json((run_dir / INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def set_aside(run_dir: Path, before: RunInfo | None) -> None:
    """Rename an earlier run's files, so that a new run in the same directory starts with empty records.

    Raises ``RunDirectoryError`` where they cannot be renamed.
    """
    name = _label(before)
    for old in (INFO_NAME, RECORDS_NAME):
        path = run_dir / old
        try:
            if path.exists() and path.stat().st_size > 0:
                path.rename(unused(path.with_name(f"{path.stem}.{name}{path.suffix}")))
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={str(run_dir)!r} holds an earlier run whose {old} cannot be set aside "
                f"({error.strerror or error}). Choose another run directory."
            ) from error


def continue_after(run_dir: Path, before: RunInfo | None, step: int) -> Continued:
    """Leave the records up to ``step`` in the journal, and move later ones and damaged ones after them aside.

    The file set aside is on disk before the journal is cut. Raises ``OSError``, with the journal as it was.
    """
    path = run_dir / RECORDS_NAME
    if not path.exists() or path.stat().st_size == 0:
        return Continued()
    with path.open("r+b") as stream:
        end, last = _end_of(stream, step)
        stream.seek(end)
        kept, moved = bytearray(), 0
        aside = unused(path.with_name(f"{path.stem}.{_label(before)}.after-step-{step}{path.suffix}"))
        try:
            with aside.open("xb") as out:
                while line := stream.readline(MAX_LINE_BYTES):
                    found = _step_of(line)
                    if found is not None and found[1] <= step:
                        kept += line if line.endswith(b"\n") else line + b"\n"
                    elif line.strip():
                        moved += 1
                        out.write(line)
                out.flush()
                os.fsync(out.fileno())
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        if moved == 0:
            aside.unlink()
            return Continued(last)
        _sync_directory(run_dir)
        stream.seek(end)
        stream.write(kept)  # in place, over what stands in the file set aside by now
        stream.truncate(end + len(kept))
        stream.flush()
    return Continued(last, moved, aside)


@dataclass(frozen=True)
class Gap:
    """Steps that a resumed run's journal does not hold, for a note record."""

    step: int
    message: str


def resume(run_dir: Path, before: RunInfo | None, step: int, told: Callable[[str], None]) -> Gap | None:
    """Make the journal ready for a run that goes on from the checkpoint of ``step``; returns what is missing from it.

    Raises ``RunDirectoryError`` where the earlier records can neither be cut back nor set aside.
    """
    info = run_dir / INFO_NAME
    if before is None and info.exists():
        damaged = unused(run_dir / "run.damaged.json")
        info.rename(damaged)
        told(f"{info} cannot be read and is set aside as {damaged.name}: the run goes on under a new run id.")
    try:
        found = continue_after(run_dir, before, step)
    except OSError as error:
        set_aside(run_dir, before)
        why = error.strerror or str(error)
        message = f"Resumed at step {step}: the earlier records could not be cut back ({why}) and are set aside."
        told(message)
        return Gap(1, message)
    if found.aside is not None:
        told(
            f"Resumed at step {step}: {found.moved} line{'' if found.moved == 1 else 's'} after it "
            f"{'is' if found.moved == 1 else 'are'} set aside in {found.aside.name}; those steps are recorded again."
        )
    if found.last is None:
        told(f"Resumed at step {step}: {run_dir} holds no earlier records, this journal begins at step {step + 1}.")
    elif found.last < step:
        first = found.last + 1
        missing = f"step {step} is" if first == step else f"steps {first} to {step} are"
        message = f"Resumed at step {step}: the records end at step {found.last}, {missing} not on record."
        told(message)
        return Gap(first, message)
    return None


def unused(path: Path) -> Path:
    """``path``, or the same with a number where that exists: nothing is ever overwritten."""
    number, free = 2, path
    while free.exists():
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return free


def _label(before: RunInfo | None) -> str:
    """What an earlier run's files are named by; the identifier comes from a file, so only its plain characters."""
    plain = "".join(c for c in before.run_id if c.isalnum() or c in "-_")[:64] if before is not None else ""
    return plain or f"{time.time():.0f}"


def _end_of(stream: BinaryIO, step: int) -> tuple[int, int | None]:
    """Offset after the last step record that is not later than ``step``, and its step; (0, None) without one."""
    for offset, line in _backwards(stream):
        found = _step_of(line)
        if found is not None and found[0] == "step" and found[1] <= step:
            return offset + len(line), found[1]
    return 0, None


def _backwards(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) from the last line to the first; an over-long line comes empty."""
    begin = stream.seek(0, os.SEEK_END)
    carry, dropped = b"", False
    while begin > 0:
        size = min(BLOCK_BYTES, begin)
        begin -= size
        stream.seek(begin)
        block = stream.read(size) + carry
        parts = block.split(b"\n")
        lines = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
        at = begin + len(block)
        for line in reversed(lines[1:]):
            at -= len(line)
            yield at, b"" if dropped else line
            dropped = False
        carry = lines[0]
        if len(carry) > MAX_LINE_BYTES:
            carry, dropped = b"", True
    yield 0, b"" if dropped else carry


def _step_of(line: bytes) -> tuple[str, int] | None:
    """(kind, step) of a line, or ``None`` where it is no record."""
    try:
        data = json.loads(line)
        return str(data["kind"]), int(data["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
