"""What the ranks of a distributed run tell each other about a step, and the records that come of it.

Every rank enters the exchange once a step at the same place, with the same number of figures, whatever it has: an
empty batch and a failed probe travel as "nothing to say". How many figures follows from the step's tier alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftscope.config import DriftscopeConfig
from driftscope.hooks.ranks import Ranks
from driftscope.hooks.window import Window
from driftscope.mismatch import figures
from driftscope.mismatch import layout as mismatch_layout
from driftscope.ranks.ledger import RankWatch
from driftscope.ranks.share import FIELDS, Local, Share, empty_row, row_of
from driftscope.ranks.whole import merge, quantiles_from_bins
from driftscope.records import StepRecord

HEADER = ("own_ms", "step_ms", "forward_ms", "stop", "off")
STAGES = (
    "attach", "capture", "counts", "config", "is_ratio", "mismatch", "head", "reference", "liger", "oracle",
    "attribution", "kept_mass", "canary", "fused_call", "corrected", "param_norm", "capsule", "record", "window",
    "gather", "pack", "profile", "run_info", "drift", "records", "report", "console", "metrics", "rules", "journal",
    "bias", "bias_load", "cadence",
)  # fmt: skip
"""Stages that a rank can tell by name; another one shows as ``other``."""
BOUNDS = mismatch_layout.SIZE - mismatch_layout.SUMS
MOST_BLOCKS = 64
"""Micro-batches of a window whose figures travel; further ones are recorded as rank 0 has them."""


@dataclass(frozen=True)
class Step:
    """What the ranks told each other about one step. ``own_ms``, ``step_ms``: the largest of any rank."""

    shares: dict[int, list[Share]]
    bounds: dict[int, list[list[float]]]
    sums: dict[int, Tensor]
    gradient: Tensor
    own_ms: float
    step_ms: float
    stop: bool
    off: list[frozenset[str]]


class Together:
    """The exchange of one scope."""

    def __init__(self, trainer: Any, config: DriftscopeConfig, told: Callable[[str, str], None]) -> None:
        self.trainer, self.config = trainer, config
        self.ranks = Ranks(trainer.accelerator, told)
        self.watch = RankWatch(self.ranks.processes)
        self.stop = False  # rank 0 wants the run to end: told with the next step's figures, so that all end together
        self._told_off: list[frozenset[str]] = [frozenset()] * self.ranks.processes

    def connect(self, *, ready: bool) -> None:
        """Open the line. ready: whether this rank's wrappers are in place; without them it would miss exchanges."""
        settings = {k: v for k, v in self.config.as_dict().items() if k not in ("run_dir", "console", "report")}
        text = json.dumps([settings, ready], sort_keys=True, default=str)
        self.ranks.connect(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
        if not ready:
            self.ranks.close()

    def agree(self, counts: tuple[float, float] | None, ready: bool) -> tuple[tuple[float, float] | None, bool]:
        """Before the loss of a measured micro-batch: the ranks' mean token counts, and whether all are ready.

        counts: (with the tool mask, without it) of this rank; ``None`` where they could not be had.
        """
        table = self.ranks.table([float(ready), *(counts or (math.nan, math.nan))])
        if table is None:
            return None, False
        means = tuple(sum(row[i] for row in table) / len(table) for i in (1, 2))
        known = all(math.isfinite(m) for m in means)
        return ((means[0], means[1]) if known else None), all(row[0] == 1.0 for row in table)

    # -- the step's exchange ------------------------------------------------------------------------------------

    def exchange(
        self, window: Window, own_ms: float, off: dict[str, str], gradient: Tensor, pack: Callable[..., Any]
    ) -> Step | None:
        """Tell the others and hear from them; every rank calls it once a step. ``None`` without a line.

        gradient: packed sketches of deep steps, of the same length everywhere. pack: runs ``pack_blocks`` guarded.
        """
        if not self.ranks.open:
            return None
        chosen = window.chosen[:MOST_BLOCKS]
        blocks, sums = pack(pack_blocks, window) or (
            [empty_block() for _ in chosen],
            torch.zeros(len(chosen) * self._sums_size(window), dtype=torch.float64),
        )
        head = [
            own_ms,
            max(window.passed_ms() - window.own_ms, 0.0),
            window.forward_ms(),
            float(self.stop),
            _bits(off),
        ]
        row = [*head, *(value for block in blocks for value in block)]
        found = self.ranks.exchange(row, torch.cat([sums, gradient]))
        return self._read(chosen, found[0], found[1], window) if found is not None else None

    def _sums_size(self, window: Window) -> int:
        return mismatch_layout.SUMS if window.tier != "light" else 0

    def _read(self, chosen: tuple[int, ...], table: list[list[float]], sums: Tensor, window: Window) -> Step:
        width, size = len(FIELDS) + BOUNDS, self._sums_size(window)
        at = {m: len(HEADER) + i * width for i, m in enumerate(chosen)}
        self.watch.times([row[2] for row in table])
        names = len(FIELDS)
        return Step(
            shares={m: [Share.read(r, row[a : a + names]) for r, row in enumerate(table)] for m, a in at.items()},
            bounds={m: [row[a + names : a + width] for row in table] for m, a in at.items()},
            sums={m: sums[i * size : (i + 1) * size] for i, m in enumerate(chosen)},
            gradient=sums[len(chosen) * size :],
            own_ms=max(row[0] for row in table),
            step_ms=max(row[1] for row in table),
            stop=any(row[3] > 0 for row in table),
            off=[_names(row[4]) for row in table],
        )

    # -- what rank 0 makes of it --------------------------------------------------------------------------------

    def merged(self, window: Window, told: Step, blank: Callable[[int], StepRecord]) -> dict[int, StepRecord]:
        """The records of the whole micro-batches, by micro-step. blank: a record for one that this rank has not."""
        out = dict(window.records)
        for micro_step, shares in told.shares.items():
            if not any(share.present for share in shares):
                continue
            own = window.records.get(micro_step) or blank(micro_step)
            local = window.locals.get(micro_step, Local())
            details = local.explanation.details if local.explanation is not None else {}
            record = merge(own, shares, details)
            if local.mismatch is not None and record.mismatch is not None and told.sums[micro_step].numel():
                rows = torch.tensor(told.bounds[micro_step], dtype=torch.float64)
                known = rows[torch.isfinite(rows).all(-1)]
                packed = torch.cat([told.sums[micro_step], known.amax(0)])
                record.mismatch = figures(local.mismatch.unpack(packed))
                quantiles_from_bins(record)
            record.ranks = self.watch.record(record, shares, [len(names) for names in told.off])
            out[micro_step] = record
        return out

    def news(self, told: Step) -> list[tuple[int, str]]:
        """(rank, stage) switched off elsewhere that were not told of before."""
        fresh = [
            (rank, stage)
            for rank, (before, now) in enumerate(zip(self._told_off, told.off, strict=True))
            for stage in sorted(now - before)
            if rank != self.ranks.rank
        ]
        self._told_off = told.off
        return fresh


def pack_blocks(window: Window) -> tuple[list[list[float]], Tensor]:
    """This rank's rows of the window's measured micro-batches, and the sums of their mismatch."""
    rows, sums = [], []
    for m in window.chosen[:MOST_BLOCKS]:
        record, local = window.records.get(m), window.locals.get(m, Local())
        packed = local.mismatch.pack().cpu() if local.mismatch is not None else None
        row = row_of(record, local) if record is not None and m not in window.failed else empty_row()
        bounds = packed[mismatch_layout.SUMS :].tolist() if packed is not None else [math.nan] * BOUNDS
        rows.append([*row, *bounds])
        if window.tier != "light":
            zeros = torch.zeros(mismatch_layout.SUMS, dtype=torch.float64)
            sums.append(packed[: mismatch_layout.SUMS] if packed is not None else zeros)
    return rows, torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def empty_block() -> list[float]:
    """The row of a micro-batch of which nothing could be packed."""
    return [*empty_row(), *([math.nan] * BOUNDS)]


def _bits(off: dict[str, str]) -> float:
    known = sum(1 << i for i, stage in enumerate(STAGES) if stage in off)
    return float(known | (1 << len(STAGES) if set(off) - set(STAGES) else 0))


def _names(bits: float) -> frozenset[str]:
    whole = int(bits) if math.isfinite(bits) else 0
    return frozenset(name for i, name in enumerate((*STAGES, "other")) if whole >> i & 1)
