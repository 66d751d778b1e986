"""Evenly spaced windows of a journal of any size, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from driftscope._journal_reader import UnknownKindError, _lines, parse_line
from driftscope.records import StepRecord

_HEAD = 400  # bytes in which step and tier stand
_STEP = re.compile(rb'"step":\s*(\d{1,18})\D')
_LIGHT = re.compile(rb'"tier":\s*"light"')


@dataclass
class _Stride:
    """Windows of one sort: every ``stride``-th of them is kept, counted from the first."""

    limit: int
    stride: int = 1
    windows: int = 0
    step: int | None = None
    kept: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)  # window -> (line number, line)

    def add(self, step: int, number: int, line: bytes) -> None:
        if step != self.step:
            self.step = step
            self.windows += 1
            if len(self.kept) > 2 * self.limit:
                self.stride *= 2
                self.kept = {w: lines for w, lines in self.kept.items() if w % self.stride == 0}
        window = self.windows - 1
        if window % self.stride == 0:
            self.kept.setdefault(window, []).append((number, line))


@dataclass(frozen=True)
class Sample:
    """steps: the records of the kept windows, in the order of the file. measured: analysed windows in all."""

    steps: list[StepRecord]
    measured: int


def sample(file: Path, limit: int) -> Sample:
    """Between ``limit`` and twice as many analysed windows and light ones each, where the journal has as many.

    Which windows stay depends on their order alone: two runs of one cadence keep the same steps. Lines that cannot be
    read are passed over. Raises ``OSError`` where the file cannot be read.
    """
    sorts = {False: _Stride(limit), True: _Stride(limit)}
    with file.open("rb") as stream:
        for number, line, complete in _lines(stream):
            head = line[:_HEAD]
            found = _STEP.search(head)
            if complete and found is not None and b'"step"' in head[:40]:  # the kind of a step record
                sorts[_LIGHT.search(head) is not None].add(int(found[1]), number, line)
    lines = sorted(entry for sort in sorts.values() for window in sort.kept.values() for entry in window)
    return Sample(list(_records(lines, file)), sorts[False].windows)


def _records(lines: list[tuple[int, bytes]], file: Path) -> Iterator[StepRecord]:
    for number, line in lines:
        try:
            record = parse_line(line, file, number)
        except (ValueError, ValidationError, RecursionError, UnknownKindError):
            continue
        if isinstance(record, StepRecord):
            yield record
