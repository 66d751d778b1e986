"""The run on disk: ``run.json`` (what ran) and ``records.jsonl`` (one JSON object a line, append-only).

The file can be read while it is written. A torn last line is skipped with a note; damaged lines are skipped, counted
and named. NaN and infinity are written as ``null`` and their fields are named in a step's ``nonfinite``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, Self

from driftscope._journal_reader import INFO_NAME, RECORDS_NAME, Record, Run, iter_records, read_run, records_path
from driftscope._jsonable import drop_incomplete, to_jsonable
from driftscope.errors import RunDirectoryError
from driftscope.records import RunInfo, StepRecord

__all__ = ["JournalWriter", "Record", "Run", "encode", "iter_records", "read_run", "records_path"]


class JournalWriter:
    """Writes one run's files. After construction it never raises: the first trouble is kept in ``failed``.

    Raises ``RunDirectoryError`` when the directory cannot be made or its records file cannot be appended to.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.failed: str | None = None
        self._stream: BinaryIO | None = None
        path = self.run_dir / RECORDS_NAME
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            torn = _ends_torn(path)
            self._stream = path.open("ab")
            if torn:
                self._stream.write(b"\n")
                self._stream.flush()
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={str(self.run_dir)!r} cannot be written ({error.strerror or error}): Driftscope appends its "
                f"records to {RECORDS_NAME} there. Choose a directory that this process may write to."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write_info(self, info: RunInfo) -> None:
        """Replace ``run.json`` in one step, so that a reader sees the old file or the new one."""
        target = self.run_dir / INFO_NAME
        partial = target.with_name(f".{INFO_NAME}.{os.getpid()}")
        try:
            data, _ = to_jsonable(info.model_dump(by_alias=True, warnings=False))
            partial.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            partial.replace(target)
        except Exception as error:  # noqa: BLE001 - a journal never ends a run
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            self._fail(f"{INFO_NAME} could not be written", error)

    def write(self, record: Record) -> None:
        """Append one record and flush it. Goes quiet after the first write error (see ``failed``)."""
        if self._stream is None:
            return
        try:
            line = json.dumps(encode(record), allow_nan=False).encode("ascii") + b"\n"
        except Exception as error:  # noqa: BLE001 - the record is lost, the journal lives
            self._fail(f"a {record.kind} record of step {record.step} could not be encoded", error)
            return
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(f"{RECORDS_NAME} could not be written, no further records are kept", error)
            self.close()

    def close(self) -> None:
        """Close the records file; further writes are ignored."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()

    def _fail(self, what: str, error: Exception) -> None:
        if self.failed is None:
            self.failed = f"{what} in {self.run_dir}: {type(error).__name__}: {error}"


def encode(record: Record) -> dict[str, Any]:
    """A record as plain JSON types; a step's NaN and infinite fields become ``None``, named in ``nonfinite``."""
    data, nonfinite = to_jsonable(record.model_dump(by_alias=True, warnings=False))
    if isinstance(record, StepRecord):
        data["nonfinite"] = list(dict.fromkeys([*record.nonfinite, *nonfinite]))
        drop_incomplete(data)
    return data  # type: ignore[no-any-return]


def _ends_torn(path: Path) -> bool:
    """Whether an earlier crash left the file without a newline at its end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def previous_run(run_dir: Path) -> RunInfo | None:
    """The run that ``run_dir`` holds, or ``None`` where there is none or its run.json cannot be read."""
    try:
        return RunInfo.model_validate_json((run_dir / INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def set_aside(run_dir: Path, before: RunInfo | None) -> None:
    """Rename an earlier run's files, so that a new run in the same directory starts with empty records.

    Raises ``RunDirectoryError`` where they cannot be renamed.
    """
    name = before.run_id if before is not None else f"{time.time():.0f}"
    for old in (INFO_NAME, RECORDS_NAME):
        path = run_dir / old
        try:
            if path.exists() and path.stat().st_size > 0:
                path.rename(path.with_name(f"{path.stem}.{name}{path.suffix}"))
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={str(run_dir)!r} holds an earlier run whose {old} cannot be set aside "
                f"({error.strerror or error}). Choose another run directory."
            ) from error
