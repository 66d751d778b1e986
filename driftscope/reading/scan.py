"""A journal cut into parts and read line by line, each part by a process of its own."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from driftscope._journal_reader import INFO_NAME, MAX_LINE_BYTES, read_info
from driftscope.errors import RecordError
from driftscope.reading import cache
from driftscope.reading.columns import Stretches
from driftscope.reading.fold import Fold
from driftscope.records import RunInfo

BUFFER = 2**20
PARALLEL_BYTES = 64 * 2**20
"""A journal of at least this size is read by several processes where there are the cores."""
PARTS = 4
"""Most processes that read side by side; each needs about 70 MB."""
_SEAM_LINES = 20_000
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from driftscope.reading.scan import serve; serve()"


def lines(stream: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes, bool]]:
    """(place, content, ended by a newline) of every line that begins in [start, end); an over-long one comes cut."""
    stream.seek(start)
    place = start
    while place < end and (line := stream.readline(MAX_LINE_BYTES)):
        size, complete = len(line), line.endswith(b"\n")
        while not complete and len(line) >= MAX_LINE_BYTES and (rest := stream.readline(MAX_LINE_BYTES)):
            size, complete = size + len(rest), rest.endswith(b"\n")
        yield place, line, complete
        place += size


def lines_from_end(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file from the last to the first, in memory of about the longest of them."""
    end, rest = stream.seek(0, os.SEEK_END), b""
    while end > 0:
        start = max(0, end - BUFFER)
        stream.seek(start)
        first, *whole = (stream.read(end - start) + rest).split(b"\n")
        yield from reversed(whole)
        end, rest = start, first[-MAX_LINE_BYTES:]
    yield rest


def fold_lines(fold: Fold, path: Path, start: int, end: int) -> Fold:
    """Add the lines that begin in [start, end) to the sums. A ``RecordError`` is kept in ``failed``."""
    if fold.failed is not None:
        return fold
    with path.open("rb", buffering=BUFFER) as stream, _without_gc():
        for place, line, complete in lines(stream, start, end):
            if line.isspace():
                fold.lines += 1
                continue
            try:
                fold.add(line, complete, place)
            except RecordError as error:
                fold.failed = (fold.lines, str(error))
                break
    return fold


def fold_file(path: Path, info: RunInfo | None, processes: int | None = None, *, cached: bool = True) -> Fold:
    """The sums over a whole journal; ``processes`` is chosen by size and cores where it is ``None``.

    cached: use what an earlier reader kept of a large journal, and keep it for the next one.
    Raises ``OSError`` where the file cannot be read.
    """
    size = path.stat().st_size
    first, last = _span(path, size)
    end = _complete(path, size)
    known = cache.load(path, info) if cached and size >= cache.CACHE_BYTES else None
    fold, start = known or (Fold(path, info, Stretches.over(first, last)), 0)
    fold.reach(last)
    fold = _fold_parts(fold, path, start, end, info, processes)
    worth_it = cached and end >= cache.CACHE_BYTES and end - start >= cache.CACHE_BYTES // 2
    if worth_it and fold.failed is None:
        cache.save(fold, path, end, info)
    return fold_lines(fold, path, end, size)  # the line that is still being written, if any


def _fold_parts(fold: Fold, path: Path, start: int, end: int, info: RunInfo | None, processes: int | None) -> Fold:
    """Add [start, end), side by side where it is long. A process that fails is stood in for by this one."""
    if processes is None:
        processes = _cores() if end - start >= PARALLEL_BYTES else 1
    edges = [start, *_seams(path, start, end, processes), end]
    rest = list(pairwise(edges[1:]))
    helpers = [_start(path, first, last, fold.stretches) for first, last in rest]
    try:
        fold_lines(fold, path, edges[0], edges[1])
        for helper, (first, last) in zip(helpers, rest, strict=True):
            part = _finish(helper) or fold_lines(Fold(path, info, fold.stretches), path, first, last)
            if fold.failed is None:
                fold.merge(part)
    finally:
        for helper in helpers:
            if helper is not None and helper.poll() is None:
                helper.kill()
                helper.communicate()
    return fold


def _cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(PARTS, usable)


def _complete(path: Path, size: int) -> int:
    """Where the last complete line ends."""
    with path.open("rb") as stream:
        end = size
        while end > 0:
            start = max(0, end - BUFFER)
            stream.seek(start)
            found = stream.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _span(path: Path, size: int) -> tuple[int, int]:
    """First and last optimizer step, as far as the ends of the file tell."""
    with path.open("rb") as stream:
        head = _steps(stream, 0, min(size, BUFFER))
        tail = _steps(stream, max(0, size - BUFFER), size)
    steps = [*head[:1], *tail[-1:]]
    return (min(steps), max(steps)) if steps else (1, 1)


def _steps(stream: BinaryIO, start: int, end: int) -> list[int]:
    found = [_step_of(line) for _, line, _ in lines(stream, start, end)]
    return [step for step in found if step is not None and abs(step) < 2**53]


def _step_of(line: bytes) -> int | None:
    """The optimizer step of a line that is a step record."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = data.get("step") if isinstance(data, dict) and data.get("kind") == "step" else None
    return step if type(step) is int else None


def _seams(path: Path, start: int, end: int, parts: int) -> list[int]:
    """Places between which parts are read: each the beginning of a window, so that a step's records stay together."""
    out: list[int] = []
    with path.open("rb", buffering=BUFFER) as stream:
        for part in range(1, parts):
            stream.seek(start + (end - start) * part // parts)
            stream.readline(MAX_LINE_BYTES)
            seam, before = end, None
            for number, (place, line, _) in enumerate(lines(stream, stream.tell(), end)):
                step = _step_of(line)
                if number >= _SEAM_LINES or (step is not None and before is not None and step != before):
                    seam = place
                    break
                before = step if step is not None else before
            if (out[-1] if out else start) < seam < end:
                out.append(seam)
    return out


def _start(path: Path, start: int, end: int, stretches: Stretches) -> subprocess.Popen[bytes] | None:
    """A process that reads one part; it imports neither torch nor anything of the trainer's."""
    order = json.dumps([str(path.resolve()), start, end, stretches.first, stretches.width])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(sys.path), order],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None


def _finish(helper: subprocess.Popen[bytes] | None) -> Fold | None:
    """What a process found, or ``None`` where it failed."""
    if helper is None:
        return None
    out, _ = helper.communicate()
    if helper.returncode != 0:
        return None
    try:
        fold = pickle.loads(out)  # from our own process, through a pipe that nobody else has
    except Exception:  # noqa: BLE001 - then this process reads the part itself
        return None
    return fold if isinstance(fold, Fold) else None


def serve() -> None:
    """What a reading process runs: the sums of the part that its arguments name, pickled to stdout."""
    path, start, end, first, width = json.loads(sys.argv[2])
    info = read_info(Path(path).with_name(INFO_NAME), [])
    fold = fold_lines(Fold(Path(path), info, Stretches(first, width)), Path(path), start, end)
    sys.stdout.buffer.write(pickle.dumps(fold, protocol=pickle.HIGHEST_PROTOCOL))
    sys.stdout.buffer.flush()


@contextmanager
def _without_gc() -> Iterator[None]:
    """Parsing makes millions of objects and no cycles: looking for them would take as long as the parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
