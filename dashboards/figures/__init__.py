"""The figures of a run: one figure, one file, each a pure function of the step records that returns a ``Panel``."""

from __future__ import annotations

from driftscope.dashboards.figures.base import Panel
from driftscope.dashboards.figures.causes import CauseSummary, causes, summarize_causes
from driftscope.dashboards.figures.gap import gap
from driftscope.dashboards.figures.grad_norm import grad_norm
from driftscope.dashboards.figures.loss import loss
from driftscope.dashboards.figures.normalizer import normalizer
from driftscope.dashboards.figures.ratio_distribution import ratio_distribution
from driftscope.dashboards.figures.ratio_time import ratio_time
from driftscope.dashboards.figures.residual import residual
from driftscope.dashboards.figures.scatter import scatter

__all__ = [
    "CauseSummary",
    "Panel",
    "causes",
    "gap",
    "grad_norm",
    "loss",
    "normalizer",
    "ratio_distribution",
    "ratio_time",
    "residual",
    "scatter",
    "summarize_causes",
]
