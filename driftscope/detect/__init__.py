"""Drift over time: streaming detectors on one scalar a step, such as a log grad-norm ratio or a mean log IS ratio.

Plain Python, bounded memory. ``Monitor`` is the front door; the four detectors work on their own too.
"""

from __future__ import annotations

from driftscope.detect.alarm import KINDS, Alarm, Kind
from driftscope.detect.baseline import Baseline, BaselineSettings
from driftscope.detect.bias import BiasDetector, BiasSettings
from driftscope.detect.monitor import Monitor, MonitorSettings
from driftscope.detect.shift import ShiftDetector, ShiftSettings
from driftscope.detect.spike import SpikeDetector, SpikeSettings
from driftscope.detect.trend import TrendDetector, TrendSettings

__all__ = [
    "KINDS",
    "Alarm",
    "Baseline",
    "BaselineSettings",
    "BiasDetector",
    "BiasSettings",
    "Kind",
    "Monitor",
    "MonitorSettings",
    "ShiftDetector",
    "ShiftSettings",
    "SpikeDetector",
    "SpikeSettings",
    "TrendDetector",
    "TrendSettings",
]
