"""Gradients too large to be kept twice, compared by a linear sketch: norms, cosine, difference, and a bias over steps.

    layout = SketchLayout.of({name: p.numel() for name, p in model.named_parameters()}, size=4096)
    a, b = GradientSketch(layout), GradientSketch(layout)
    a.add(name, grad)                                       # micro-batch by micro-batch, shard by shard
    ratio(Pair.of(a, b))                                    # -> Figure(value, error)

A sketch is linear: those of micro-batches and of ranks add up. Every figure has a standard error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.sketch.bias import Bias, BiasTracker
    from driftscope.sketch.estimates import Figure, Module, Pair, cosine, difference, modules, norm, ratio
    from driftscope.sketch.exact import ExactGradient, exact_pair
    from driftscope.sketch.gradient import GradientSketch
    from driftscope.sketch.layout import SketchLayout

_HOME = {
    "Bias": "driftscope.sketch.bias",
    "BiasTracker": "driftscope.sketch.bias",
    "ExactGradient": "driftscope.sketch.exact",
    "Figure": "driftscope.sketch.estimates",
    "GradientSketch": "driftscope.sketch.gradient",
    "Module": "driftscope.sketch.estimates",
    "Pair": "driftscope.sketch.estimates",
    "SketchLayout": "driftscope.sketch.layout",
    "cosine": "driftscope.sketch.estimates",
    "difference": "driftscope.sketch.estimates",
    "exact_pair": "driftscope.sketch.exact",
    "modules": "driftscope.sketch.estimates",
    "norm": "driftscope.sketch.estimates",
    "ratio": "driftscope.sketch.estimates",
}

__all__ = [
    "Bias",
    "BiasTracker",
    "ExactGradient",
    "Figure",
    "GradientSketch",
    "Module",
    "Pair",
    "SketchLayout",
    "cosine",
    "difference",
    "exact_pair",
    "modules",
    "norm",
    "ratio",
]
__getattr__, __dir__ = lazy_names(globals(), _HOME)
