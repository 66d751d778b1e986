"""Processes of this project that tests start and kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def started(module: str, *arguments: object, **options: object) -> Iterator[subprocess.Popen[str]]:
    """``python -m module arguments`` with pipes for stdin and stdout; ended with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()
