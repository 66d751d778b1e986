"""``python -m driftscope``: the command line."""

from __future__ import annotations

from driftscope.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
