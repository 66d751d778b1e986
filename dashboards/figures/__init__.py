"""The figures of a run: one figure, one file, each a pure function of the step records that returns a ``Panel``."""

from __future__ import annotations

from driftscope.dashboards.figures.alarms import alarms
from driftscope.dashboards.figures.base import Panel
from driftscope.dashboards.figures.cadence import cadence
from driftscope.dashboards.figures.canary import canary
from driftscope.dashboards.figures.causes import CauseSummary, causes, summarize_causes
from driftscope.dashboards.figures.drift import drift
from driftscope.dashboards.figures.gap import gap
from driftscope.dashboards.figures.grad_norm import grad_norm
from driftscope.dashboards.figures.loss import loss
from driftscope.dashboards.figures.mismatch_bins import by_position, by_probability, by_progress
from driftscope.dashboards.figures.mismatch_causes import mismatch_causes
from driftscope.dashboards.figures.mismatch_distribution import mismatch_distribution
from driftscope.dashboards.figures.normalizer import normalizer
from driftscope.dashboards.figures.processes import gradient, slowest
from driftscope.dashboards.figures.ratio_distribution import ratio_distribution
from driftscope.dashboards.figures.ratio_time import ratio_time
from driftscope.dashboards.figures.residual import residual
from driftscope.dashboards.figures.scatter import scatter

__all__ = [
    "CauseSummary",
    "Panel",
    "alarms",
    "by_position",
    "by_probability",
    "by_progress",
    "cadence",
    "canary",
    "causes",
    "drift",
    "gap",
    "grad_norm",
    "gradient",
    "loss",
    "mismatch_causes",
    "mismatch_distribution",
    "normalizer",
    "ratio_distribution",
    "ratio_time",
    "residual",
    "scatter",
    "slowest",
    "summarize_causes",
]
