"""A short program run as two ranks of a gloo group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def outputs(program: str, store: Path, timeout_s: float = 200) -> list[str]:
    """What each rank printed. The program finds its rank and the path of a new file store in ``sys.argv``.

    Raises AssertionError with its errors where a rank does not end well.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(store)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out = []
    try:
        for process in ranks:
            printed, errors = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, errors
            out.append(printed)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return out
