"""Writing a page: whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from driftscope.errors import RunDirectoryError


def write_page(html: str, target: Path, option: str) -> Path:
    """Write a page to ``target`` and return it; a reader never sees half of one.

    option: the argument that named the target. Raises ``RunDirectoryError`` where it cannot be written.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(html, encoding="utf-8", newline="\n")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RunDirectoryError(
            f"{option}={str(target)!r} cannot be written ({error.strerror or error}): the report is one HTML file. "
            "Choose a path that this process may write to."
        ) from error
    return target
