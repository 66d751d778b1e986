"""Reading a run of any size: one pass over the journal, in memory that does not grow with it.

    summary = summarise("runs/mine")     # counts, medians, extremes, alerts, and where the extremes stand
    judge(summary)                       # the verdict, as for driftscope.read_run
    summary.kept()                       # the records that a report of the whole run shows

A journal of a few megabytes is better read whole (``driftscope.read_run``); ``read_any`` chooses by its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.reading.keeper import Keeper
    from driftscope.reading.summary import Summary, last_steps, read_any, summarise

_HOME = {
    "Keeper": "driftscope.reading.keeper",
    **dict.fromkeys(("Summary", "last_steps", "read_any", "summarise"), "driftscope.reading.summary"),
}

__all__ = ["Keeper", "Summary", "last_steps", "read_any", "summarise"]
__getattr__, __dir__ = lazy_names(globals(), _HOME)
