"""Keeps the sums of a journal fresh while it is written, so that the first report of a long run is quick too."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

EVERY_BYTES = 128 * 2**20
"""What the journal has to grow by; reading it takes one or two seconds of one core."""
_CODE = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "getattr(os, 'nice', int)(10)\n"
    "from driftscope.reading import summarise\n"
    "summarise(sys.argv[2], processes=1)"
)


class Keeper:
    """Looks after one journal: call ``poll`` after a window was written. It never raises and never waits.

    The reading is done by a process of its own, at a low priority, one at a time.
    """

    def __init__(self, records: Path, every_bytes: int = EVERY_BYTES) -> None:
        self._records, self._every = Path(records), every_bytes
        self._read = 0
        self._reader: subprocess.Popen[bytes] | None = None

    def poll(self) -> None:
        """Start a reader where the journal has grown enough since the last one."""
        with contextlib.suppress(OSError, ValueError):
            if self._reader is not None and self._reader.poll() is not None:
                self._reader = None
            size = self._records.stat().st_size
            if self._reader is None and size - self._read >= self._every:
                self._read = size
                self._reader = subprocess.Popen(
                    [sys.executable, "-c", _CODE, json.dumps(sys.path), str(self._records.resolve())],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            elif size < self._read:  # another run's file
                self._read = size

    def close(self) -> None:
        """End a reader that is still at it; what it had read is read again by the next one."""
        reader, self._reader = self._reader, None
        if reader is not None and reader.poll() is None:
            with contextlib.suppress(OSError):
                reader.kill()
                reader.wait()
