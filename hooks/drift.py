"""Drift over the steps of a run: the watched series, their detectors, and what goes into the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from driftscope.detect import Alarm, Monitor, MonitorSettings
from driftscope.records import DriftRecord, StepRecord
from driftscope.rules.base import Thresholds, finite

Series = Callable[[StepRecord], float | None]


def log_is_mean(record: StepRecord) -> float | None:
    """Log of the mean raw importance sampling ratio of a token."""
    ratio = record.is_ratio
    return _log(ratio.raw_token.mean) if ratio is not None and ratio.raw_token is not None else None


def log_is_std(record: StepRecord) -> float | None:
    """Log of the standard deviation of the raw importance sampling ratio of a token."""
    ratio = record.is_ratio
    return _log(ratio.raw_token.std) if ratio is not None and ratio.raw_token is not None else None


def log_gap(record: StepRecord) -> float | None:
    """Log of the gradient norm ratio, candidate / reference; on analysed steps."""
    return _log(record.gap.grad_norm_ratio) if record.gap is not None else None


SERIES: dict[str, Series] = {"log_is_mean": log_is_mean, "log_is_std": log_is_std, "log_gap": log_gap}
# A constant gap is DS101's, and a spread has no value of its own to be biased from: only the mean ratio has, 1.
BIASED = frozenset({"log_is_mean"})
SPREAD_FLOOR = math.log(1.2)
"""A spread that moves by less than a fifth is no drift: the batches differ by that much."""


class DriftWatch:
    """Feeds each window's last record to the detectors and notes what they say in it."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        limits = thresholds or Thresholds()
        self._multiple, self._noise = limits.noise_multiple, limits.unmeasured_noise
        self._monitors: dict[str, Monitor] = {}
        self._floors = {"log_is_mean": self._multiple * self._noise, "log_is_std": SPREAD_FLOOR, "log_gap": 0.0}

    def update(self, record: StepRecord) -> None:
        """Take in the last record of a window, and fill its ``drift``."""
        self._measure_floor(record)
        for name, series in SERIES.items():
            value = series(record)
            monitor = self._monitors.get(name)
            if monitor is None:
                if value is None:
                    continue
                monitor = self._monitors[name] = self._monitor(name)
            alarm = monitor.update(record.step, value)
            record.drift[name] = _state(monitor, value, alarm)

    def resume(self, records: Iterable[StepRecord]) -> None:
        """Take in the values of a run that goes on; nothing is told again."""
        for record in records:
            for name, seen in record.drift.items():
                if name in SERIES:
                    monitor = self._monitors.setdefault(name, self._monitor(name))
                    monitor.update(record.step, seen.value)

    def _monitor(self, name: str) -> Monitor:
        settings = MonitorSettings() if name in BIASED else MonitorSettings(bias=None)
        return Monitor(name, floor=self._floors[name], settings=settings)

    def _measure_floor(self, record: StepRecord) -> None:
        """The noise floor that the canary measured, before a monitor is made; a mean within it never alarms."""
        if record.canary is not None and "log_is_mean" not in self._monitors:
            measured = max(finite(record.canary.noise_floor) or 0.0, finite(record.canary.bf16_noise) or 0.0)
            self._floors["log_is_mean"] = self._multiple * measured
        if record.gap is not None and "log_gap" not in self._monitors:
            floor = finite(record.gap.noise_floor)
            self._floors["log_gap"] = self._multiple * (self._noise if floor is None else floor)


def _state(monitor: Monitor, value: float | None, alarm: Alarm | None) -> DriftRecord:
    baseline = monitor.shift.baseline if monitor.shift is not None else None
    out = DriftRecord(value=value, floor=monitor.floor)
    if baseline is not None and baseline.ready:
        out.baseline, out.state = baseline.level, "quiet"
    if monitor.open:
        out.state, out.kind = "alarm", monitor.kind
    if alarm is not None:
        out.fresh, out.state, out.kind = True, "alarm", alarm.kind
        out.started, out.score, out.baseline = alarm.started, alarm.score, alarm.baseline
        out.level = alarm.value
    return out


def _log(value: float | None) -> float | None:
    known = finite(value)
    return math.log(known) if known is not None and known > 0 else None
