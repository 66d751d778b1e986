"""Reading a run back: streaming, forgiving about single lines, strict about whose file it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from driftscope._jsonable import drop_incomplete, to_jsonable
from driftscope.errors import RecordError
from driftscope.records import SCHEMA_VERSION, AlertRecord, NoteRecord, RunInfo, StepRecord

RECORDS_NAME = "records.jsonl"
INFO_NAME = "run.json"
MAX_LINE_BYTES = 16 * 2**20
MAX_NAMED_LINES = 10
MAX_KINDS = 20
MANY_KINDS = "(further ones)"

Record = StepRecord | AlertRecord | NoteRecord
_KINDS: dict[str, type[StepRecord | AlertRecord | NoteRecord]] = {
    "step": StepRecord,
    "alert": AlertRecord,
    "note": NoteRecord,
}


@dataclass(frozen=True)
class Run:
    """A run as read back from disk. ``problems`` says in words what could not be read."""

    info: RunInfo | None
    steps: list[StepRecord]
    alerts: list[AlertRecord]
    notes: list[NoteRecord]
    problems: list[str] = field(default_factory=list)


def records_path(path: Path) -> Path:
    """The records file that ``path`` (a run directory or the file itself) means. Raises ``RecordError``."""
    path = Path(path)
    if path.is_dir():
        if not (path / RECORDS_NAME).is_file():
            raise RecordError(
                f"{path} holds no {RECORDS_NAME}: no run was recorded there. "
                "Give the directory that was run_dir of driftscope.attach, or of driftscope demo --out."
            )
        return path / RECORDS_NAME
    if not path.exists():
        raise RecordError(f"{path} does not exist. Give a run directory or its {RECORDS_NAME}.")
    return path


def iter_records(path: Path, problems: list[str] | None = None) -> Iterator[Record]:
    """Stream the records of a run in file order; what had to be skipped is added to ``problems``.

    Raises ``RecordError`` for a file that is missing, unreadable, empty, foreign or of an unknown schema version.
    """
    path = records_path(path)
    skipped = Skipped()
    found = False
    try:
        with path.open("rb") as stream:
            for number, line, complete in _lines(stream):
                try:
                    record = parse_line(line, path, number)
                except UnknownKindError as error:
                    skipped.name_unknown(str(error), number)
                    continue
                except (ValueError, ValidationError, RecursionError):
                    if complete:
                        skipped.name_damaged(number)
                    else:
                        skipped.torn = number
                    continue
                found = True
                yield record
            size = stream.tell()
    except OSError as error:
        why = error.strerror or str(error)
        raise RecordError(f"{path} cannot be read ({why}). Check the path and its permissions.") from error
    if not found and not skipped.unknown:
        raise RecordError(nothing_readable(path, size, skipped))
    if problems is not None:
        problems.extend(skipped.describe())


def read_run(path: Path) -> Run:
    """Read a whole run from its directory or its records file. Raises ``RecordError`` as ``iter_records`` does."""
    file = records_path(path)
    problems: list[str] = []
    info = read_info(file.with_name(INFO_NAME), problems)
    run = Run(info=info, steps=[], alerts=[], notes=[], problems=problems)
    for record in iter_records(file, problems):
        if isinstance(record, StepRecord):
            run.steps.append(record)
        elif isinstance(record, AlertRecord):
            run.alerts.append(record)
        else:
            run.notes.append(record)
    return run


class UnknownKindError(Exception):
    """A line of a kind that this version does not know."""


@dataclass
class Numbered:
    """Lines of one sort: how many, and the numbers of the first ones."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, number: int) -> None:
        """Take in a line."""
        self.count += 1
        if len(self.first) < MAX_NAMED_LINES:
            self.first.append(number)

    def merge(self, other: Numbered, lines: int) -> None:
        """Take in those of a later part of the file, which has ``lines`` lines before it."""
        self.count += other.count
        self.first = (self.first + [number + lines for number in other.first])[:MAX_NAMED_LINES]


@dataclass
class Skipped:
    """The lines that could not be read, by number from 1."""

    damaged: Numbered = field(default_factory=Numbered)
    unknown: dict[str, Numbered] = field(default_factory=dict)
    torn: int | None = None

    def name_damaged(self, number: int) -> None:
        """Take in a line that is no record."""
        self.damaged.add(number)

    def name_unknown(self, kind: str, number: int) -> None:
        """Take in a line of a kind that this version does not know."""
        if kind not in self.unknown and len(self.unknown) >= MAX_KINDS:
            kind = MANY_KINDS
        self.unknown.setdefault(kind, Numbered()).add(number)

    def merge(self, other: Skipped, lines: int) -> None:
        """Take in a later part of the file, which has ``lines`` lines before it."""
        self.damaged.merge(other.damaged, lines)
        for kind, numbers in other.unknown.items():
            self.unknown.setdefault(kind, Numbered()).merge(numbers, lines)
        self.torn = other.torn + lines if other.torn is not None else self.torn

    def describe(self) -> list[str]:
        """One sentence for each sort of line that was skipped."""
        out = []
        if self.damaged.count:
            out.append(f"{_count(self.damaged, 'damaged line')} skipped ({_named(self.damaged)}).")
        for kind, numbers in self.unknown.items():
            out.append(f"{_count(numbers, 'line')} of unknown kind {kind} ignored ({_named(numbers)}).")
        if self.torn is not None:
            out.append(f"The last line ({self.torn}) is incomplete and was skipped: still being written, or cut off.")
        return out


def _count(lines: Numbered, noun: str) -> str:
    return f"{lines.count} {noun}{'' if lines.count == 1 else 's'}"


def _named(lines: Numbered) -> str:
    shown = ", ".join(str(n) for n in lines.first)
    more = lines.count - len(lines.first)
    return f"line{'' if lines.count == 1 else 's'} {shown}" + (f" and {more} more" if more > 0 else "")


def nothing_readable(path: Path, size: int, skipped: Skipped) -> str:
    """Why a file without a single record is refused."""
    if size == 0:
        return f"{path} is empty: no record was written yet. Wait for the run's first analysed step, or run it again."
    if skipped.torn is not None and not skipped.damaged.count:
        return f"{path} holds no complete record. Wait for the run's first analysed step, or run it again."
    return (
        f"{path} is not a Driftscope records file: none of its {skipped.damaged.count} lines is a record. "
        f"Give a run directory or its {RECORDS_NAME}."
    )


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, content, ended by a newline) of every non-blank line; an over-long one comes cut."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        complete = line.endswith(b"\n")
        while not complete and len(line) >= MAX_LINE_BYTES and (rest := stream.readline(MAX_LINE_BYTES)):
            complete = rest.endswith(b"\n")
        if line.strip():
            yield number, line, complete


def parse_line(line: bytes, path: Path, number: int) -> Record:
    """One record. Raises ``ValueError`` for a damaged line, ``UnknownKindError``, ``RecordError`` for the schema."""
    data = json.loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError("no record")
    _check_schema(data, path, f"line {number}")
    model = _KINDS.get(data["kind"])
    if model is None:
        raise UnknownKindError(repr(data["kind"])[:40])
    data, nonfinite = to_jsonable(data)
    if model is StepRecord:
        named = data.get("nonfinite")
        data["nonfinite"] = list(dict.fromkeys([*(named if isinstance(named, list) else []), *nonfinite]))
        drop_incomplete(data)
    return model.model_validate(data)


def _check_schema(data: dict[str, Any], path: Path, where: str) -> None:
    schema = data.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise ValueError("no schema version")
    if schema != SCHEMA_VERSION:
        raise RecordError(
            f"{path}, {where}: schema version {schema} is unknown; this Driftscope reads version {SCHEMA_VERSION}. "
            "Read the run with the version of Driftscope that wrote it (run.json names it), or upgrade."
        )


def read_info(path: Path, problems: list[str]) -> RunInfo | None:
    """run.json, or ``None`` and a sentence in ``problems``. Raises ``RecordError`` for an unknown schema version."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("not an object")
        _check_schema(data, path, "top level")
        return RunInfo.model_validate(to_jsonable(data)[0])
    except FileNotFoundError:
        problems.append(f"{INFO_NAME} is missing: the run's versions and settings are unavailable.")
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        detail = "damaged" if not isinstance(error, OSError) else (error.strerror or str(error))
        problems.append(f"{INFO_NAME} cannot be read ({detail}): the run's versions and settings are unavailable.")
    return None
