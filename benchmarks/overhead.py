"""What Driftscope costs: step time and peak memory of a real GRPOTrainer, awake and asleep side by side in one run.

One case:    python benchmarks/overhead.py [--out FILE] [--tiers deep spectrum light] [options of the case]
A list:      python benchmarks/overhead.py --sweep one --out FILE          (one GPU, about 6 minutes on an H200)
             torchrun --nproc-per-node 2 benchmarks/overhead.py --sweep several --out FILE       (about 4 minutes)
By stage:    python benchmarks/overhead.py --profile [--tiers spectrum]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from accelerate.state import AcceleratorState
from interleaved import Run, agreed, alternate
from paired import TIERS, Plan, compare, composed
from training import build, is_main, options, shape, tell, write

PLANS = {"light": Plan(2, 60, cycle=2), "spectrum": Plan(2, 20), "deep": Plan(1, 6)}

Case = dict[str, Any]
SWEEPS: dict[str, list[Case]] = {
    # tiers and seconds a tier; everything else are options of the case
    "one": [
        {"name": "0.5b", "seconds": 25},
        {"name": "0.5b LoRA", "lora": True, "seconds": 12},
        {"name": "0.5b, 256 tokens", "tokens": 256, "tiers": ["spectrum"], "seconds": 8},
        {"name": "0.5b, 4096 tokens", "tokens": 4096, "batch": 2, "tiers": ["spectrum"], "seconds": 12},
        {"name": "0.5b, vocabulary 32000", "vocabulary": 32000, "tiers": ["spectrum"], "seconds": 8},
        {"name": "1.5b", "shape": "1.5b", "seconds": 16},
        {"name": "3b", "shape": "3b", "tiers": ["deep", "spectrum"], "seconds": 20},
    ],
    "several": [
        {"name": "0.5b DDP", "seconds": 16},
        {"name": "1.5b FSDP2", "shape": "1.5b", "fsdp2": True, "tiers": ["spectrum"], "seconds": 25},
        {"name": "0.5b DDP LoRA", "lora": True, "tiers": ["deep", "spectrum"], "seconds": 10},
    ],
    "tiny": [
        {"name": "tiny", "shape": "tiny"},
        {"name": "tiny LoRA", "shape": "tiny", "lora": True},
        {"name": "tiny, vocabulary 2000", "shape": "tiny", "vocabulary": 2000, "tiers": ["spectrum"]},
    ],
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One case: every tier in its own run of the same trainer, deep steps first, as in a run's first step."""
    with tempfile.TemporaryDirectory() as directory:
        trainer, _ = build(args, directory, even=True)
        trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        found = {}
        for tier in sorted(args.tiers, key=TIERS.index, reverse=True):
            plan = replace(PLANS[tier], cycles=args.cycles or PLANS[tier].cycles)
            run = alternate(trainer, Path(directory) / tier, tier, plan, args.seconds)
            found[tier] = figures(run)
            if is_main():
                told = found[tier]["overhead"]
                print(f"  {tier}: {told['median']:+.2%} [{told['low']:+.2%}, {told['high']:+.2%}] of "
                      f"{found[tier]['median_step_ms']['asleep']:.0f} ms", file=sys.stderr, flush=True)  # fmt: skip
        live = run.live
    return {"live": live, "trainable_parameters": trainable, "model": shape(args), "tiers": found,
            "composed": composed(found)}  # fmt: skip


def figures(run: Run) -> dict[str, Any]:
    """One tier's figures: against the asleep neighbours, and by Driftscope's own account."""
    out = compare(run.rows, run.plan)
    awake = {row.index: row for row in run.rows if row.awake}
    asleep_ms = out["median_step_ms"]["asleep"]
    own = [run.own_ms[i] for i in awake if i >= run.plan.first and i in run.own_ms]
    return out | {
        "first_ms": awake[min(awake)].ms - asleep_ms,  # what the first awake step cost, compilation and all
        "recorded_ms": statistics.median(own) if own else None,
        "off": run.off,
    }


def sweep(args: argparse.Namespace, cases: list[Case]) -> dict[str, Any]:
    """Every case; one that fails is recorded as failed, and one that would begin too late as left out.

    With several processes a case goes on only if it fails on all of them, as for want of memory; else they wait.
    """
    begun, done = time.perf_counter(), {}
    for case in cases:
        name, changes = case["name"], {k: v for k, v in case.items() if k != "name"}
        if is_main():
            print(f"{name} ({time.perf_counter() - begun:.0f} s)", file=sys.stderr, flush=True)
        if agreed(time.perf_counter() - begun > 60 * args.minutes):
            done[name] = {"left_out": f"the {args.minutes:g} minutes of the sweep were over"}
            continue
        started = time.perf_counter()
        done[name] = attempt(argparse.Namespace(**{**vars(args), **changes}))
        done[name] |= {"case": changes, "took_s": round(time.perf_counter() - started, 1)}
        write(args, {"cases": done})
    return {"cases": done}


def attempt(args: argparse.Namespace) -> dict[str, Any]:
    """A case's figures, or how it failed; either way the device is free again afterwards."""
    try:
        return measure(args)
    except Exception as error:  # noqa: BLE001 - out of memory, above all: the sweep goes on
        lines = traceback.format_exception(error, limit=-4)
        if is_main():
            print("".join(lines), file=sys.stderr, flush=True)
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        release()


def release() -> None:
    """Forget the case's trainer: its memory, and the accelerate settings that it left in the process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    AcceleratorState._reset_state()
    for name in [n for n in os.environ if n.startswith("FSDP_") or n == "ACCELERATE_USE_FSDP"]:
        del os.environ[name]


def profiles(args: argparse.Namespace) -> dict[str, Any]:
    """One analysed step of each tier by stage."""
    from stages import profiled, table

    found = {}
    for tier in args.tiers:
        with tempfile.TemporaryDirectory() as directory:
            trainer, _ = build(args, directory, even=True)
            found[tier] = profiled(trainer, Path(directory) / "run", tier, args.rounds)
        if is_main():
            print(f"{tier}\n{table(found[tier])}", file=sys.stderr, flush=True)
        del trainer
        release()
    return {"profiles": found}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument(
        "--cycles", type=int, help="most awake steps of a tier (default: light 60, spectrum 20, deep 6)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of a tier's run, at most (a sweep has its own)")
    parser.add_argument("--sweep", choices=list(SWEEPS), help="go through a list of cases")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="of the sweep, only these")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which a sweep begins no further case")
    parser.add_argument("--profile", action="store_true", help="where an analysed step's time goes, by stage")
    parser.add_argument("--rounds", type=int, default=4, help="timed steps of the profile")
    args = parser.parse_args(argv)
    known = [case["name"] for case in SWEEPS.get(args.sweep or "", [])]
    if args.cases and not set(args.cases) <= set(known):
        parser.error(f"--cases {args.cases}: the sweep has {known}")
    return args


def main() -> None:
    """Measure what the command line asks for."""
    args = arguments()
    if args.profile:
        found = profiles(args)
    elif args.sweep:
        found = sweep(args, [c for c in SWEEPS[args.sweep] if not args.cases or c["name"] in args.cases])
    else:
        found = measure(args)
    tell(args, found)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
