"""The sufficient statistics of a mismatch: one flat float64 tensor, merged by addition and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.mismatch import layout

AppliedLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class MismatchSums:
    """What ``measure_mismatch`` measured, on its device; nothing is read back before ``figures``.

    ``packed``: (layout.SIZE,) float64, [sums | extrema]. ``cap``, ``floor``: the bounds of the applied ratio that the
    counts refer to. ``applied_level``: ``token`` for (B, T) weights, ``sequence`` for (B, 1), ``None`` without.
    """

    packed: Tensor
    cap: float | None = None
    floor: float | None = None
    applied_level: AppliedLevel | None = None

    def pack(self) -> Tensor:
        """The (layout.SIZE,) tensor to send: ``all_gather`` it (one collective) and give the rows to ``unpack``.

        Or, with two: ``all_reduce(SUM)`` of ``pack()[:layout.SUMS]`` and ``all_reduce(MAX)`` of the rest.
        """
        return self.packed

    def unpack(self, rows: Tensor) -> MismatchSums:
        """The whole of several packed measurements, (layout.SIZE,) or (n, layout.SIZE), with this one's bounds.

        Raises ``UsageError`` for another shape.
        """
        if rows.shape[-1:] != (layout.SIZE,) or rows.dim() > 2 or rows.numel() == 0:
            raise UsageError(
                f"unpack() was given a tensor of shape {tuple(rows.shape)}, but a packed mismatch has {layout.SIZE} "
                "numbers: pass what pack() returned, one row for each rank."
            )
        rows = rows.reshape(-1, layout.SIZE).to(torch.float64)
        whole = torch.cat([rows[:, : layout.SUMS].sum(0), rows[:, layout.SUMS :].amax(0)])
        return MismatchSums(whole, self.cap, self.floor, self.applied_level)


def merge(first: MismatchSums, *others: MismatchSums) -> MismatchSums:
    """The mismatch of all batches together; associative and commutative up to float64 rounding.

    Raises ``UsageError`` where the bounds or the level of the applied ratio differ.
    """
    level = first.applied_level
    for other in others:
        level = level or other.applied_level
        if (other.cap, other.floor) != (first.cap, first.floor) or (other.applied_level or level) != level:
            raise UsageError(
                f"merge() was given mismatches measured with cap={first.cap}, floor={first.floor}, applied level "
                f"{first.applied_level} and cap={other.cap}, floor={other.floor}, {other.applied_level}: their counts "
                "mean different things. Measure the micro-batches of a step with the same settings."
            )
    if not others:
        return first
    rows = torch.stack([first.packed, *(other.packed.to(first.packed.device) for other in others)])
    return MismatchSums(rows, first.cap, first.floor, level).unpack(rows)


def reduce_ranks(sums: MismatchSums) -> MismatchSums:
    """The mismatch over all ranks, by one ``all_gather`` of layout.SIZE float64; itself without a process group.

    Every rank has to call it.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return sums
    rows = [torch.empty_like(sums.packed) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(rows, sums.packed.contiguous())
    return sums.unpack(torch.stack(rows))
