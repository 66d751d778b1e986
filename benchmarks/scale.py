"""How long `driftscope report` and `driftscope check` take on a journal of many optimizer steps, and what they need.

    python benchmarks/scale.py [--steps 1000000] [--out benchmarks/results/scale.json] [--keep DIR]

The journal is made from the records of a real run: the demo's trainer, with a spectrum step every 4th and a deep one
every 8th optimizer step. Its windows are repeated with their figures varied, at the default cadence: a light record a
step, four micro-batches on each 20th step, deep ones on each 1000th, alerts as that run had them, all thinned and
encoded as ``driftscope.thinning`` does it. A few lines are damaged, and a few figures are made extreme, to be found
again. Wall time is only worth something on a machine that does nothing else; the load before is in the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from driftscope.journal import encode, read_run  # noqa: E402
from driftscope.records import StepRecord  # noqa: E402
from driftscope.thinning import in_full, slim, thin  # noqa: E402

SPECTRUM_EVERY, DEEP_EVERY = 20, 1000
VARIANTS = 40
DAMAGED = 5
STEP = 987654321  # stands in a template for the step to come
NOT_VARIED = frozenset({"time", "share", "cap", "accumulation", "low", "high", "unavailable", "head", "detail"})


@dataclass(frozen=True)
class Window:
    """The lines of one optimizer step, around the places where its number stands."""

    parts: list[bytes]
    lines: int

    def at(self, step: int) -> bytes:
        """The lines of that step."""
        return str(step).encode().join(self.parts)


def real_run(directory: Path) -> Path:
    """A run of the demo's trainer at a mixed cadence."""
    import driftscope
    from driftscope.hooks.demo import build_trainer, quiet
    from driftscope.hooks.sampler import stand_in_engine

    with tempfile.TemporaryDirectory() as scratch, quiet(), stand_in_engine(seed=0):
        try:
            trainer = build_trainer(Path(scratch), steps=25)
        except driftscope.UsageError:  # a stack without Liger's loss
            trainer = build_trainer(Path(scratch), steps=25, live="reference")
        scope = driftscope.attach(
            trainer, run_dir=directory, spectrum_every=4, deep_every=8, max_overhead=0.0, report=False, console=False
        )
        try:
            trainer.train()
        finally:
            scope.detach()
    return directory


def windows(run_dir: Path) -> dict[tuple[str, bool], list[Window]]:
    """(tier, in full) -> windows of the real run, each in ``VARIANTS`` variants."""
    run, rng = read_run(run_dir), random.Random(0)
    by_step: dict[int, list[StepRecord]] = {}
    for record in run.steps:
        by_step.setdefault(record.step, []).append(record)
    found: dict[tuple[str, bool], list[Window]] = {}
    for step, records in by_step.items():
        if step == 1:
            continue  # its warm-up is not typical
        tier = max((r.tier for r in records), key=["light", "spectrum", "deep"].index)
        alerts = [encode(a) | {"step": STEP} for a in run.alerts if a.step == step]
        for full in (True, False):
            index = 0 if full else 1_000_001
            thinned = [encode(thin(r, index, False)) | {"step": STEP, "judged": True} for r in records]
            variants = range(VARIANTS if tier == "light" or not full else 6)
            made = [_window([slim(vary(data, rng)) for data in thinned], alerts) for _ in variants]
            found.setdefault((tier, full), []).extend(made)
    return found


def vary(value: Any, rng: random.Random, name: str = "") -> Any:
    """The same record with its figures a few percent away."""
    if isinstance(value, dict):
        return {k: v if k in NOT_VARIED else vary(v, rng, k) for k, v in value.items()}
    if isinstance(value, list):
        return [vary(v, rng, name) for v in value]
    return value * math.exp(rng.gauss(0, 0.05)) if isinstance(value, float) else value


def _window(records: list[dict[str, Any]], alerts: list[dict[str, Any]]) -> Window:
    lines = [json.dumps(data, separators=(",", ":")).encode() for data in [*records, *alerts]]
    return Window((b"\n".join(lines) + b"\n").split(str(STEP).encode()), len(lines))


def journal(steps: int, found: dict[tuple[str, bool], list[Window]]) -> Iterator[bytes]:
    """The lines of a run of that many optimizer steps."""
    rng = random.Random(1)
    seen = {"light": 0, "analysed": 0}
    for step in range(1, steps + 1):
        tier = "deep" if step % DEEP_EVERY == 1 else "spectrum" if step % SPECTRUM_EVERY == 1 else "light"
        sort = "light" if tier == "light" else "analysed"
        choices = found[tier, in_full(seen[sort], False)]
        seen[sort] += 1
        yield choices[rng.randrange(len(choices))].at(step)


def extremes(steps: int) -> dict[int, tuple[str, float]]:
    """Step -> a figure to be made extreme there."""
    return {
        steps // 3 // 20 * 20 + 1: ("grad_norm_ratio", 54321.0),
        steps // 2 // 20 * 20 + 1: ("grad_norm_ratio", 0.000321),
        steps * 2 // 3 // 20 * 20 + 3: ("live_grad_norm", 9876.5),
        steps * 3 // 4 // 20 * 20 + 7: ("loss", -77.25),
    }


def write(directory: Path, steps: int, source: Path) -> dict[str, Any]:
    """Write such a run; says what it holds."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_bytes((source / "run.json").read_bytes())
    made, special = windows(source), extremes(steps)
    damaged = {steps * (i + 1) // (DAMAGED + 1) for i in range(DAMAGED)}
    with (directory / "records.jsonl").open("wb", buffering=2**22) as stream:
        for step, block in enumerate(journal(steps, made), 1):
            if step in special:
                block = _extreme(block, *special[step])
            if step in damaged:
                block = block[: len(block) // 2] + b"\n"
            stream.write(block)
    file = directory / "records.jsonl"
    with file.open("rb") as stream:
        kinds = [b'"kind":"alert"' in line[:80] for line in stream]
    return {
        "optimizer_steps": steps,
        "bytes": file.stat().st_size,
        "lines": len(kinds),
        "alerts": sum(kinds),
        "damaged_lines": DAMAGED,
    }  # fmt: skip


def _extreme(block: bytes, name: str, value: float) -> bytes:
    line, _, rest = block.partition(b"\n")
    data = json.loads(line)
    if name == "grad_norm_ratio":
        data["gap"][name] = value
    elif name == "loss":
        data["paths"][data["live"]][name] = value
    else:
        data[name] = value
    return json.dumps(data, separators=(",", ":")).encode() + b"\n" + rest


def timed(command: list[str]) -> dict[str, Any]:
    """Wall and CPU seconds, exit code and peak memory (sum of all processes of the command, every 20 ms)."""
    before, begun = os.times(), time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak: dict[str, int] = {"rss": 0, "pss": 0}
    watch = threading.Thread(target=_watch, args=(process, peak))
    watch.start()
    out, err = process.communicate()
    wall, after = time.perf_counter() - begun, os.times()
    watch.join()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {
        "wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "peak_rss_mb": round(peak["rss"] / 2**20),
        "peak_pss_mb": round(peak["pss"] / 2**20), "exit_code": process.returncode,
        "output": out.decode(), "errors": err.decode(),
    }  # fmt: skip


def _watch(process: subprocess.Popen[bytes], peak: dict[str, int]) -> None:
    import psutil

    while process.poll() is None:
        rss = pss = 0
        try:
            root = psutil.Process(process.pid)
            for one in [root, *root.children(recursive=True)]:
                memory = one.memory_full_info()
                rss, pss = rss + memory.rss, pss + memory.pss
        except psutil.Error:
            pass
        peak["rss"], peak["pss"] = max(peak["rss"], rss), max(peak["pss"], pss)
        time.sleep(0.02)


def checks(directory: Path, holds: dict[str, Any], verdict: dict[str, Any]) -> dict[str, bool]:
    """Whether what has to be in verdict and report is."""
    page = (directory / "report.html").read_text(encoding="utf-8")
    alerts = sum(f["count"] for f in verdict["findings"] if f["rule"] != "DS111")  # that one is of run.json
    return {
        "level is critical": verdict["level"] == "critical",
        "every damaged line is counted": any(f"{DAMAGED} damaged lines" in p for p in verdict["problems"]),
        "every alert is counted in the verdict": alerts == holds["alerts"],
        "every alert is counted in the report": f"All {holds['alerts']:,} alerts" in page,
        **{
            f"{name} {value:g} is drawn": f"{value:.7g}" in page
            for name, value in extremes(holds["optimizer_steps"]).values()
        },
    }


def main() -> None:
    """Write the journal, run both commands on it, print and keep what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="directory for the journal; what is there already is used")
    parser.add_argument("--source", type=Path, help="a real run to take the records from")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = args.source or real_run(Path(scratch) / "source")
        directory = args.keep or Path(scratch) / "run"
        about = directory / "about.json"
        if not about.exists():
            made = write(directory, args.steps, source)
            about.write_text(json.dumps(made))
        holds = json.loads(about.read_text())
        found = measure(directory, holds, args.repeat)
    print(json.dumps(found, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measure(directory: Path, holds: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Both commands, without and with what an earlier reader kept; the quickest of each counts."""
    found: dict[str, Any] = {"machine": f"{os.cpu_count()} CPU cores", "python": platform.python_version()}
    found["load_average_before"] = round(os.getloadavg()[0], 1)
    found["journal"] = holds
    verdict: dict[str, Any] = {}
    for name in ("check", "report"):
        options = ["--json"] if name == "check" else []
        command = [sys.executable, "-m", "driftscope", name, *options, str(directory)]
        for state in ("first", "again"):
            runs = []
            for _ in range(repeat):
                if state == "first":
                    (directory / "records.summary").unlink(missing_ok=True)
                runs.append(timed(command))
            best = min(runs, key=lambda run: run["wall_s"])
            verdict = json.loads(best["output"]) if name == "check" else verdict
            found[f"{name}, {state} time"] = {k: v for k, v in best.items() if k not in ("output", "errors")}
            found[f"{name}, {state} time"]["wall_s_all"] = [run["wall_s"] for run in runs]
    found["summary_mb"] = round((directory / "records.summary").stat().st_size / 2**20, 2)
    found["page_mb"] = round((directory / "report.html").stat().st_size / 2**20, 2)
    found["verdict"] = {name: verdict[name] for name in ("level", "headline", "steps", "problems")}
    found["right"] = checks(directory, holds, verdict)
    return found


if __name__ == "__main__":
    main()
