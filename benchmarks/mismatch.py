"""What the mismatch metrics cost: the fused pass and its one read-back, on CPU or CUDA.

Use: python benchmarks/mismatch.py [--out FILE] [--device cuda] [--shape 8x1024 ...] [--repeats N]

Prints JSON: median and 90th percentile in ms for each shape of (sequences x tokens), with and without an applied
ratio. ``measure`` is the pass with the device idle at both ends, ``submit`` its host time alone, ``read`` the copy to
the host and the arithmetic there, ``merge`` that of two micro-batches. Memory beyond the inputs: CUDA only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from driftscope.mismatch import figures, layout, measure_mismatch, merge

SHAPES = ("8x1024", "64x4096")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device, repeats: int, *, wait: bool = True) -> dict[str, float]:
    """Median and 90th percentile of a call in ms; without ``wait`` the device may still be at work at its end."""
    for _ in range(3):
        work()
    ms = []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        work()
        if wait:
            synchronise(device)
        ms.append((time.perf_counter() - begun) * 1e3)
    synchronise(device)
    ms.sort()
    return {"median_ms": round(statistics.median(ms), 4), "p90_ms": round(ms[int(0.9 * (len(ms) - 1))], 4)}


def measured(B: int, T: int, device: torch.device, repeats: int, applied: bool) -> dict[str, Any]:
    """One shape: bf16-like noise on float32 log-probs, ragged mask."""
    generator = torch.Generator().manual_seed(0)
    engine = -(torch.rand(B, T, generator=generator) ** 3) * 12
    trainer = (engine + 0.03 * torch.randn(B, T, generator=generator)).to(device)
    engine = engine.to(device)
    mask = (torch.arange(T) < torch.randint(T // 2, T + 1, (B, 1), generator=generator)).to(device)
    weight = (trainer - engine).exp().clamp(max=3.0) if applied else None

    def run() -> Any:
        return measure_mismatch(trainer, engine, mask, applied=weight, cap=3.0)

    sums = run()
    out: dict[str, Any] = {"sequences": B, "tokens_each": T, "applied": applied}
    out["measure"] = timed(run, device, repeats)
    out["submit"] = timed(run, device, repeats, wait=False)
    out["read"] = timed(lambda: figures(sums), device, repeats)
    out["merge"] = timed(lambda: merge(sums, sums), device, repeats)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        out["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), help="sequences x tokens, for example 8x1024")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [tuple(int(side) for side in shape.split("x")) for shape in options.shape]
    results = [measured(B, T, device, options.repeats, applied) for B, T in shapes for applied in (False, True)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    report = {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packed_bytes": layout.SIZE * 8,
        "results": results,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
