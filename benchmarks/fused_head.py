"""Benchmark of fused heads, peers included. Run from the repository root on a machine with a GPU:

    python benchmarks/fused_head.py --out benchmarks/results/h200.json

The same as ``driftscope bench --peers benchmarks/peers.py``; correctness is checked before any time is taken.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from driftscope.cli import main

    sys.exit(main(["bench", "--peers", str(ROOT / "benchmarks" / "peers.py"), *sys.argv[1:]]))
