"""How far the trainer's log-probs are from the sampling engine's, on one batch, mergeable over batches and ranks.

    sums = measure_mismatch(old_BT, sampling_BT, mask_BT)   # one pass on the device, no synchronisation
    sums = merge(sums, other_micro_batch)                   # or reduce_ranks(sums)
    figures(sums)                                           # one copy to the host -> Mismatch

``FORMULAS`` has a formula, a unit and the field's names for every figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.mismatch.formulas import FORMULAS, Formula
    from driftscope.mismatch.model import Mismatch
    from driftscope.mismatch.reading import figures
    from driftscope.mismatch.statistics import measure_mismatch
    from driftscope.mismatch.sums import MismatchSums, merge, reduce_ranks

_HOME = {
    "FORMULAS": "driftscope.mismatch.formulas",
    "Formula": "driftscope.mismatch.formulas",
    "Mismatch": "driftscope.mismatch.model",
    "MismatchSums": "driftscope.mismatch.sums",
    "figures": "driftscope.mismatch.reading",
    "measure_mismatch": "driftscope.mismatch.statistics",
    "merge": "driftscope.mismatch.sums",
    "reduce_ranks": "driftscope.mismatch.sums",
}

__all__ = [
    "FORMULAS",
    "Formula",
    "Mismatch",
    "MismatchSums",
    "figures",
    "measure_mismatch",
    "merge",
    "reduce_ranks",
]
__getattr__, __dir__ = lazy_names(globals(), _HOME)
