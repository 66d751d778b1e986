"""Several processes: what each rank says of a micro-batch, and the record that they make together.

row = row_of(record, local)                         # on each rank; travels in the step's one collective
merged = merge(record, [Share.read(r, row) ...])    # on rank 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.ranks.ledger import RankWatch
    from driftscope.ranks.share import FIELDS, Local, Share, empty_row, row_of
    from driftscope.ranks.whole import merge

_HOME = {
    "FIELDS": "driftscope.ranks.share",
    "Local": "driftscope.ranks.share",
    "RankWatch": "driftscope.ranks.ledger",
    "Share": "driftscope.ranks.share",
    "empty_row": "driftscope.ranks.share",
    "merge": "driftscope.ranks.whole",
    "row_of": "driftscope.ranks.share",
}

__all__ = ["FIELDS", "Local", "RankWatch", "Share", "empty_row", "merge", "row_of"]
__getattr__, __dir__ = lazy_names(globals(), _HOME)
