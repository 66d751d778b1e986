"""What was summed up of a journal, kept beside it, so that the next reader only reads what was written since.

``records.summary`` is a convenience, never the truth. It is used only where its checksum is right, this version of
Driftscope wrote it, and the part of the journal that it sums up is still there, byte for byte as far as samples of it
tell; else it is passed over and made anew. A directory that cannot be written to does without.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

from driftscope.reading.fold import Fold
from driftscope.records import RunInfo

SUFFIX = ".summary"
CACHE_BYTES = 64 * 2**20
"""A smaller journal is read anew each time."""
MAX_CACHE_BYTES = 256 * 2**20
FORMAT = 1
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_ENDS = 65536
_NOT_KEPT = ("path", "_unjudged")
_ALLOWED = frozenset(
    {
        *(("driftscope.reading.fold", name) for name in ("PathTally", "Marks")),
        *(("driftscope.reading.columns", name) for name in ("Stretches", "Column", "Columns", "Rows")),
        *(("driftscope.reading.digest", name) for name in ("Digest", "StepSet", "_Bins")),
        *(("driftscope.reading.alerts", name) for name in ("Alerts", "RuleTally")),
        *(
            ("driftscope.reading.events", name)
            for name in (
                "Bins",
                "CauseTally",
                "Causes",
                "Disagreement",
                "LimitTally",
                "Limits",
                "Ranks",
                "Troubles",
                "Watch",
            )
        ),
        *(("driftscope._run_facts", name) for name in ("FactsTally", "_Compared")),
        ("driftscope._verdict_engine", "EngineTally"),
        *(("driftscope._journal_reader", name) for name in ("Skipped", "Numbered")),
        ("driftscope.records", "NoteRecord"),
        *(("collections", name) for name in ("Counter", "deque")),
        ("builtins", "set"),
        ("copyreg", "_reconstructor"),
        ("builtins", "object"),
        *(
            (f"numpy.{core}.{module}", name)
            for core in ("core", "_core")
            for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
        ),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }
)


class _Unpickler(pickle.Unpickler):
    """Makes nothing but the classes that sums are made of, so that a foreign file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a summary")
        return super().find_class(module, name)


def save(fold: Fold, path: Path, end: int, info: RunInfo | None) -> bool:
    """Keep the sums over the first ``end`` bytes of the journal; whether that was possible."""
    target = path.with_suffix(SUFFIX)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        state = {name: value for name, value in fold.__dict__.items() if name not in _NOT_KEPT}
        body = zlib.compress(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL), 1)
        head = {**_head(path, end, info), "sum": hashlib.sha256(body).hexdigest()}
        partial.write_bytes(json.dumps(head).encode() + b"\n" + body)
        partial.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


def load(path: Path, info: RunInfo | None) -> tuple[Fold, int] | None:
    """The sums that were kept and the number of bytes that they cover, where they can be trusted."""
    try:
        kept = path.with_suffix(SUFFIX)
        if kept.stat().st_size > MAX_CACHE_BYTES:
            return None
        first, _, body = kept.read_bytes().partition(b"\n")
        head = json.loads(first)
        end = head["end"]
        if type(end) is not int or not 0 < end <= path.stat().st_size:
            return None
        if head != {**_head(path, end, info), "sum": hashlib.sha256(body).hexdigest()}:
            return None
        unpacker = zlib.decompressobj()
        state = _Unpickler(io.BytesIO(unpacker.decompress(body, 8 * MAX_CACHE_BYTES))).load()
        fold = Fold(path, info, state["stretches"])
        if state.keys() != fold.__dict__.keys() - set(_NOT_KEPT):
            return None
        fold.__dict__.update(state)
        fold.watch_unjudged(info)
    except Exception:  # noqa: BLE001 - whatever is wrong with it: the journal is there
        return None
    return fold, end


def _head(path: Path, end: int, info: RunInfo | None) -> dict[str, Any]:
    """What has to be the same for the sums to be those of this journal."""
    from driftscope import __version__

    settings = json.dumps(info.settings if info is not None else {}, sort_keys=True, default=str)
    return {
        "driftscope": __version__,
        "format": FORMAT,
        "end": end,
        "settings": hashlib.sha256(settings.encode()).hexdigest(),
        "records": _samples(path, end),
    }


def _samples(path: Path, end: int) -> str:
    """A digest of both ends of the first ``end`` bytes and of pieces spread evenly between them."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        pieces = [(0, _ENDS), (max(0, end - _ENDS), _ENDS)]
        pieces += [(end * i // _SAMPLES, _SAMPLE_BYTES) for i in range(1, _SAMPLES)]
        for start, size in pieces:
            stream.seek(start)
            digest.update(stream.read(min(size, end - start)))
    return digest.hexdigest()
