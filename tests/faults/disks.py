"""Small file systems of a test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size at ``at``; the test is skipped where this process may not mount one."""
    at.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "driftscope-test", str(at)], capture_output=True, text=True
    ) if os.geteuid() == 0 else None  # fmt: skip
    if made is None or made.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {'not root' if made is None else made.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path) -> Path:
    """Fill a file system to its last byte; returns the file that does it."""
    path = disk / "fill"
    with path.open("wb", buffering=0) as stream:
        for size in (4096, 1):
            try:
                while stream.write(b"x" * size):
                    pass
            except OSError:
                continue
    return path
