"""Several recorded runs side by side: what differs in how they were set up, and in what was measured.

    comparison = compare([load(path) for path in paths])    # the first is the baseline

``load`` reads one run and keeps its facts and thinned series only, so that many runs need the memory of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.comparison.assemble import compare
    from driftscope.comparison.document import as_document
    from driftscope.comparison.figures import FIGURES, Figure
    from driftscope.comparison.loading import load
    from driftscope.comparison.model import Cell, Comparison, FigureRow, RunColumn, Series

_HOME = {
    "FIGURES": "driftscope.comparison.figures",
    "Cell": "driftscope.comparison.model",
    "Comparison": "driftscope.comparison.model",
    "Figure": "driftscope.comparison.figures",
    "FigureRow": "driftscope.comparison.model",
    "RunColumn": "driftscope.comparison.model",
    "Series": "driftscope.comparison.model",
    "as_document": "driftscope.comparison.document",
    "compare": "driftscope.comparison.assemble",
    "load": "driftscope.comparison.loading",
}

__all__ = [
    "FIGURES",
    "Cell",
    "Comparison",
    "Figure",
    "FigureRow",
    "RunColumn",
    "Series",
    "as_document",
    "compare",
    "load",
]
__getattr__, __dir__ = lazy_names(globals(), _HOME)
