"""False alarms and lags of driftscope.detect on simulated series, beside river and ruptures where they are there.

    python benchmarks/detectors.py [--runs 200] [--steps 2000] [--output benchmarks/results]

writes detectors.json and detectors.svg. Noise is white, AR(1) with phi 0.5 and 0.8, and white with the tails of a
Student t with 3 degrees of freedom. Its standard deviation in the log: 0.02 for the mean log IS ratio of a batch (a
bf16 engine against an fp32 trainer gave batch means of 0.998 to 1.005 with 256 tokens, so this is pessimistic), 0.05
and 0.3 for a log ratio of gradient norms. A lag of 0 is the first step of the change.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent)]

from detector_peers import Alarms, peers, ruptures_offline, versions  # noqa: E402
from detector_plot import plot  # noqa: E402

from driftscope.detect import BiasDetector, Monitor, ShiftDetector, SpikeDetector, TrendDetector  # noqa: E402
from driftscope.detect.simulate import NOISES, SHIFTS, noise, shifted  # noqa: E402

SDS = {0.02: "mean log IS ratio", 0.05: "log grad-norm ratio, steady", 0.3: "log grad-norm ratio, rough"}
AT, AFTER = 200, 400
DETECTORS = {"spike": SpikeDetector, "shift": ShiftDetector, "trend": TrendDetector, "bias": BiasDetector}


def monitor_alarms(row: list[float]) -> Iterator[int]:
    """Indices at which driftscope's Monitor tells an alarm."""
    monitor = Monitor("simulated")
    for index, value in enumerate(row):
        if monitor.update(index + 1, value) is not None:
            yield index


def quantiles(lags: list[float]) -> dict[str, Any]:
    """Share found, median, 90% quantile and largest lag, ``None`` where that many runs did not find it."""
    lags = sorted(lags)
    picked = {"median": lags[len(lags) // 2], "p90": lags[int(0.9 * len(lags))], "max": lags[-1]}
    found = sum(map(math.isfinite, lags)) / len(lags)
    return {"runs": len(lags), "found": found, **{k: v if math.isfinite(v) else None for k, v in picked.items()}}


def false_alarms(alarms: Alarms, runs: int, steps: int, seed: int = 1) -> dict[str, Any]:
    """Alarms per 1000 steps on each noise; the warm-up counts as steps."""
    out = {}
    for kind in NOISES:
        rows = noise(kind, runs, steps, sd=0.3, seed=seed).tolist()
        count = sum(1 for row in rows for _ in alarms(row))
        out[kind] = {"steps": runs * steps, "alarms": count, "per_1000": count / (runs * steps) * 1000}
    return out


def lags(alarms: Alarms, runs: int, seed: int = 7) -> list[dict[str, Any]]:
    """First alarm at or after the shift, for every noise level, noise and shift."""
    table = []
    for sd in SDS:
        for kind in NOISES:
            base = noise(kind, runs, AT + AFTER, sd=sd, seed=seed)
            for factor in SHIFTS:
                rows = shifted(base, factor, AT).tolist()
                found = [next((i - AT for i in alarms(row) if i >= AT), math.inf) for row in rows]
                table.append({"sd": sd, "noise": kind, "shift": factor, **quantiles(found)})
    return table


def other_faults(runs: int) -> list[dict[str, Any]]:
    """Each detector on its own fault, and Monitor on it: what it calls it, and how late."""
    ramp = np.clip((np.arange(AT + AFTER) - AT) / 300, 0, 1)
    pulse = (np.arange(AT + AFTER) == AT).astype(float)
    faults = {
        "spike: one value 100x": ("spike", 0.3, math.log(100) * pulse, AT),
        "trend: to 3x in 300 steps": ("trend", 0.3, math.log(3) * ramp, AT),
        "trend: to 1.1x in 300 steps": ("trend", 0.02, math.log(1.1) * ramp, AT),
        "bias: mean 1.01 from the first step": ("bias", 0.02, np.full(AT + AFTER, math.log(1.01)), 0),
    }
    out = []
    for name, (kind, sd, fault, at) in faults.items():
        for sort in NOISES:
            alone, told, kinds = [], [], Counter[str]()
            for row in (noise(sort, runs, AT + AFTER, sd=sd, seed=11) + fault).tolist():
                detector, monitor = DETECTORS[kind](), Monitor("simulated")
                first: dict[str, float] = {}
                for i, value in enumerate(row):
                    if detector.update(i + 1, value) is not None and i >= at:
                        first.setdefault("alone", i - at)
                    alarm = monitor.update(i + 1, value)
                    if alarm is not None and i >= at and first.setdefault("told", i - at) == i - at:
                        kinds[alarm.kind] += 1
                alone.append(first.get("alone", math.inf))
                told.append(first.get("told", math.inf))
            row_out = {"fault": name, "sd": sd, "noise": sort, "detector": kind, "alone": quantiles(alone)}
            out.append({**row_out, "monitor": quantiles(told), "monitor_first_kind": dict(kinds)})
    return out


def main() -> None:
    """Run everything and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    begun = time.perf_counter()
    monitor = Monitor("simulated")
    for step, value in enumerate(noise("white", 1, 3000, sd=0.3, seed=5)[0].tolist(), 1):
        monitor.update(step, value)
    micros = (time.perf_counter() - begun) / 3000 * 1e6
    results: list[dict[str, Any]] = []
    entries: dict[str, tuple[Alarms, dict[str, Any]]] = {"driftscope Monitor": (monitor_alarms, {}), **peers()}
    for name, (alarms, settings) in entries.items():
        print(f"{time.perf_counter() - begun:.0f} s: {name} {settings}", file=sys.stderr, flush=True)
        rates = false_alarms(alarms, args.runs, args.steps)
        print({kind: round(rate["per_1000"], 3) for kind, rate in rates.items()}, file=sys.stderr, flush=True)
        results.append(
            {"detector": name, "settings": settings, "false_alarms": rates, "lags": lags(alarms, args.runs)}
        )
    cases = {
        f"sd 0.3, {kind}, {factor:g}x": (shifted(noise(kind, 50, AT + AFTER, sd=0.3, seed=7), factor, AT), AT)
        for kind in ("white", "ar1_0.8")
        for factor in (1.5, 3.0)
    }
    document = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "peers": versions(),
        "change_at": AT,
        "steps_after": AFTER,
        "noise_levels": {str(sd): words for sd, words in SDS.items()},
        "monitor_microseconds_per_step": round(micros, 1),
        "results": results,
        "other_faults": other_faults(args.runs),
        "ruptures_offline": ruptures_offline(cases),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "detectors.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (args.output / "detectors.svg").write_text(plot(results), encoding="utf-8")


if __name__ == "__main__":
    main()
