"""Other people's change detectors on the benchmark's series: river's PageHinkley and ADWIN, ruptures offline.

Imported where they are found, also unpacked in the folder that DRIFTSCOPE_PEERS names (``pip install --target``). They
have no scale of their own, so each series is standardised by the median and median absolute deviation of the same
warm-up; "whitened" ones are given driftscope's own innovations. Each has one setting, tuned on other seeds: the most
sensitive one that keeps the false alarms within the limits on white noise and on AR(1) with phi 0.8, both.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from driftscope.detect import Baseline
from driftscope.detect.simulate import noise

sys.path.append(os.environ.get("DRIFTSCOPE_PEERS", "peers"))
LIMITS = {"white": 0.1, "ar1_0.8": 1.0}
WARMUP = 50
TUNE_RUNS, TUNE_STEPS = 100, 2000
OFFLINE_AT = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 400)

Row = list[float]
Alarms = Callable[[Row], Iterator[int]]
"""Indices at which a detector alarms on a series."""


def standardised(row: Row) -> Row:
    """The series in robust standard deviations of its warm-up."""
    middle = median(row[:WARMUP])
    spread = 1.4826 * median(abs(v - middle) for v in row[:WARMUP])
    return [(v - middle) / spread for v in row]


def whitened(row: Row) -> Row:
    """Driftscope's innovations in standard deviations; zero in the warm-up."""
    base, out = Baseline(), []
    for v in row:
        out.append(base.innovation(v) if base.ready else 0.0)
        base.push(v)
    return out


INPUTS = {"raw": standardised, "whitened": whitened}


def river_alarms(make: Callable[[], Any], prepare: Callable[[Row], Row]) -> Alarms:
    """A river detector as a function of a series."""

    def alarms(row: Row) -> Iterator[int]:
        detector = make()
        for index, value in enumerate(prepare(row)):
            detector.update(value)
            if detector.drift_detected and index >= WARMUP:
                yield index

    return alarms


def peers() -> dict[str, tuple[Alarms, dict[str, Any]]]:
    """Name -> (detector, tuned setting); a library that is not there is left out with a message."""
    found: dict[str, tuple[Alarms, dict[str, Any]]] = {}
    tuning = {kind: noise(kind, TUNE_RUNS, TUNE_STEPS, sd=1.0, seed=900).tolist() for kind in LIMITS}
    try:
        from river import drift
    except ImportError as error:
        print(f"left out: river: {error}", file=sys.stderr)
        return found
    for name, prepare in INPUTS.items():
        ready = {kind: [prepare(row) for row in rows] for kind, rows in tuning.items()}
        for delta in (0.25, 0.5, 1.0):
            threshold = _page_hinkley_threshold(drift, ready, delta)
            settings = {"delta": delta, "threshold": threshold, "min_instances": WARMUP, "mode": "both"}
            made = river_alarms(lambda s=settings: drift.PageHinkley(**s), prepare)
            found[f"river PageHinkley, delta {delta:g}, {name}"] = (made, settings)
        delta = _adwin_delta(drift, ready)
        settings = {"delta": delta, "clock": 1, "grace_period": WARMUP}
        made = river_alarms(lambda s=settings: drift.ADWIN(**s), prepare)
        found[f"river ADWIN, {name}"] = (made, settings)
    return found


def versions() -> dict[str, str]:
    """Of the libraries that are there."""
    out = {}
    for name in ("river", "ruptures"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def _page_hinkley_threshold(drift: Any, ready: dict[str, list[Row]], delta: float) -> float:
    """Smallest threshold within the limits: an excursion's largest value is the threshold that it just crosses."""
    needed = 0.0
    for kind, rows in ready.items():
        peaks = []
        for row in rows:
            detector, top = drift.PageHinkley(delta=delta, threshold=math.inf, min_instances=WARMUP), 0.0
            for index, value in enumerate(row):
                detector.update(value)
                if index >= WARMUP:
                    up = detector._sum_increase - detector._min_increase
                    top = max(top, up, detector._max_decrease - detector._sum_decrease)
            peaks.append(top)
        allowed = int(LIMITS[kind] * TUNE_RUNS * TUNE_STEPS / 1000)
        needed = max(needed, sorted(peaks, reverse=True)[min(allowed, len(peaks) - 1)])
    while not _within(lambda t=needed: drift.PageHinkley(delta=delta, threshold=t, min_instances=WARMUP), ready):
        needed *= 1.1  # a run that crosses it several times
    return needed


def _adwin_delta(drift: Any, ready: dict[str, list[Row]]) -> float:
    for delta in (0.9, 0.5, 0.2, 0.1, 1e-2, 1e-3, 1e-5, 1e-8, 1e-12, 1e-20, 1e-40, 1e-80):
        if _within(lambda d=delta: drift.ADWIN(delta=d, clock=1, grace_period=WARMUP), ready):
            return delta
    return math.nan


def _within(make: Callable[[], Any], ready: dict[str, list[Row]]) -> bool:
    """Whether the false alarms are within the limits on every noise."""
    alarms = river_alarms(make, list)
    counts = {kind: sum(1 for row in rows for _ in alarms(row)) for kind, rows in ready.items()}
    return all(counts[kind] <= limit * TUNE_RUNS * TUNE_STEPS / 1000 for kind, limit in LIMITS.items())


def ruptures_offline(cases: dict[str, tuple[np.ndarray, int]]) -> dict[str, Any] | None:
    """KernelCPD with the linear kernel (least squares, exact) refitted on every prefix that is looked at.

    ``cases``: name -> series (runs, steps) and the index of the change. The penalty is tuned as above, a false
    alarm being a series of 600 steps of which any prefix (every tenth) has a change point. A change point counts as
    found when it lies within 10 steps of the truth, or after it.
    """
    try:
        import ruptures
    except ImportError as error:
        print(f"left out: ruptures: {error}", file=sys.stderr)
        return None

    def points(row: Row, penalty: float) -> list[int]:
        fitted = ruptures.KernelCPD(kernel="linear", min_size=3).fit(np.asarray(row).reshape(-1, 1))
        return fitted.predict(pen=penalty)[:-1]

    out: dict[str, Any] = {}
    for name, prepare in INPUTS.items():
        series = {kind: [prepare(r) for r in noise(kind, 40, 600, sd=1.0, seed=901).tolist()] for kind in LIMITS}
        rates: dict[str, float] = {}
        for penalty in (12, 16, 20, 25, 30, 40, 60, 80, 120, 200):
            rates = {
                kind: sum(any(points(r[:end], penalty) for end in range(60, 601, 10)) for r in rows) / (40 * 0.6)
                for kind, rows in series.items()
            }
            if all(rates[kind] <= LIMITS[kind] for kind in LIMITS):
                break
        lags: dict[str, Any] = {}
        for case, (rows, at) in cases.items():
            found = []
            for row in rows.tolist():
                ready = prepare(row)
                hits = (n for n in OFFLINE_AT if any(p >= at - 10 for p in points(ready[: at + n], penalty)))
                found.append(next(hits, math.inf))
            found.sort()
            lags[case] = {
                "runs": len(found),
                "found": float(np.mean(np.isfinite(found))),
                "median": _finite(found[len(found) // 2]),
                "p90": _finite(found[int(0.9 * len(found))]),
            }
        out[name] = {"penalty": penalty, "false_per_1000": rates, "lags": lags}
    return out


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
