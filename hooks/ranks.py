"""The ranks' own line: one collective a step, on a process group that the training does not know of.

It is a gloo group over the run's own store, so its traffic stays off the GPU's streams and out of NCCL's watchdog: a
rank that does not come costs the others one time-out, after which each measures alone. Nothing here raises.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

TIMEOUT = timedelta(seconds=float(os.environ.get("DRIFTSCOPE_RANKS_TIMEOUT", "120")))
"""How long a rank waits for the others before it goes on alone."""


class Ranks:
    """This process among the others. ``why`` says why there is no exchange, where there is none."""

    opened = 0  # the same on all ranks, which open their lines in the same order: it names them in the store

    def __init__(self, accelerator: Any, told: Callable[[str, str], None]) -> None:
        self.rank, self.processes = int(accelerator.process_index), int(accelerator.num_processes)
        self.why: str | None = None
        self._told = told
        self._group: Any = None

    @property
    def several(self) -> bool:
        """Whether the run has more than one process."""
        return self.processes > 1

    @property
    def open(self) -> bool:
        """Whether there is a line to the others."""
        return self._group is not None

    def connect(self, agreed: int) -> None:
        """Open the line; every rank calls it. agreed: a number that must be the same on all ranks (the settings)."""
        if not self.several or self._group is not None:
            return
        Ranks.opened += 1
        try:
            self._group = _group(self.rank, self.processes, Ranks.opened)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self._lose("they could not be reached", error)
            return
        _LINES.add(self)
        table = self.table([float(agreed)])
        if table is not None and len({row[0] for row in table}) > 1:
            self._lose("they were attached with other settings", None)

    def table(self, row: Sequence[float]) -> list[list[float]] | None:
        """A row of numbers of each rank, of one length; every rank calls it. ``None`` without a line."""
        found = self.exchange(row, torch.zeros(0, dtype=torch.float64))
        return found[0] if found is not None else None

    def exchange(self, row: Sequence[float], sums: Tensor) -> tuple[list[list[float]], Tensor] | None:
        """One all-reduce: each rank's row in its own place, and ``sums`` (float64, host) added up.

        Rows and sums have the same length on all ranks. Not finite numbers of ``sums`` count as zero: they would spoil
        the others'. ``None`` without a line.
        """
        if self._group is None:
            return None
        width = len(row)
        packed = torch.zeros(self.processes * width + sums.numel(), dtype=torch.float64)
        packed[self.rank * width : (self.rank + 1) * width] = torch.tensor(list(row), dtype=torch.float64)
        packed[self.processes * width :] = sums.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        try:
            self._group.allreduce([packed]).wait()
        except Exception as error:  # noqa: BLE001 - as above
            self._lose("one of them did not come to the step's exchange", error)
            return None
        rows = packed[: self.processes * width].view(self.processes, width).tolist()
        return rows, packed[self.processes * width :]

    def close(self) -> None:
        """Leave the line, and wait for its threads; the others notice at their next exchange."""
        self._group = None

    def _lose(self, what: str, error: Exception | None) -> None:
        self._group = None
        detail = f" ({type(error).__name__}: {str(error)[:200]})" if error is not None else ""
        self.why = f"the other ranks' figures are not in: {what}{detail}"
        self._told("ranks", f"{self.why}. This rank is measured alone; the run goes on.")


_LINES: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Close the lines that a run has left open, as after an exception.

    A thread of gloo that frees a tensor while the interpreter is already going aborts the process.
    """
    for ranks in list(_LINES):
        ranks.close()


def _group(rank: int, size: int, number: int) -> Any:
    """A gloo group beside the default one, unknown to torch's registry: nothing of the run counts or uses it."""
    store = dist.distributed_c10d._get_default_store()
    return dist.ProcessGroupGloo(dist.distributed_c10d.PrefixStore(f"driftscope/{number}", store), rank, size, TIMEOUT)
