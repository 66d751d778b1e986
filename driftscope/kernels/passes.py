"""The passes over the head, a tile of tokens at a time: statistics, gradient, or both in one.

Tokens are taken in a given order, so that those without a gradient cost no backward product. Shapes: N tokens,
M <= N tokens of the order, n of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from driftscope.kernels.gemms import GradientSums, Needs, raw_logits
from driftscope.kernels.head import HeadTransform, padded, statistics_dtype, tile_rows
from driftscope.kernels.row_stats import RowStats
from driftscope.kernels.rows import row_ops
from driftscope.kernels.scaling import unit_scale
from driftscope.kernels.token_terms import TokenTerms

COMPACT_BELOW = 0.9  # compact a tile whose share of rows with a gradient is under this
MOVE_ROWS = 128  # rows moved at a time, which bounds the copy


@dataclass(frozen=True, kw_only=True)
class Head:
    """Detached inputs of all passes, in the compute dtype; ``bias`` in the statistics' dtype."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    transform: HeadTransform
    workspace_bytes: int

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        workspace_bytes: int,
        dtype: torch.dtype,
    ) -> Head:
        """Detach and convert; conversions copy only where dtype or layout differ."""
        return cls(
            hidden_ND=hidden.detach().to(dtype).contiguous(),
            weight_VD=weight.detach().to(dtype).contiguous(),
            bias_V=None if bias is None else bias.detach().to(statistics_dtype(dtype)).contiguous(),
            targets_N=targets.detach().long().contiguous(),
            transform=transform,
            workspace_bytes=workspace_bytes,
        )

    @property
    def wide(self) -> torch.dtype:
        """Dtype of row statistics."""
        return statistics_dtype(self.weight_VD.dtype)

    def tiles(self, order: Tensor | None) -> Iterator[tuple[slice, slice | Tensor, Tensor, Tensor]]:
        """For each tile: where it stands in the order, which rows of hidden it takes, their hidden states and X.

        ``order``: row numbers (M,), or ``None`` for all rows as they come. X is a view of one workspace, overwritten
        by the next tile.
        """
        total = self.hidden_ND.shape[0] if order is None else order.shape[0]
        columns = self.weight_VD.shape[0]
        if total == 0:
            return
        rows = tile_rows(
            total,
            columns,
            self.weight_VD.element_size(),
            self.workspace_bytes,
            hidden_size=self.weight_VD.shape[1],
            processors=multiprocessors(self.weight_VD.device),
        )
        buffer = self.weight_VD.new_empty(rows, padded(columns))
        for start in range(0, total, rows):
            where = slice(start, min(start + rows, total))
            index = where if order is None else order[where]
            hidden_nD = self.hidden_ND[index]
            yield where, index, hidden_nD, raw_logits(buffer, hidden_nD, self.weight_VD)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 elsewhere."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 0


def statistics(head: Head, order: Tensor | None) -> RowStats:
    """Log-probs, entropies and softmax statistics of the rows in ``order``, (M,)."""
    rows = head.hidden_ND.shape[0] if order is None else order.shape[0]
    out = RowStats.empty(rows, head.wide, head.hidden_ND.device)
    ops = row_ops(head.hidden_ND.device, head.weight_VD.dtype)
    for where, index, _, tile in head.tiles(order):
        ops.stats(tile, head.bias_V, head.targets_N[index], head.transform, out.part(where))
    return out


def gradients(
    head: Head,
    order: Tensor | None,
    stats: RowStats,
    grad_logps: Tensor,
    grad_entropies: Tensor | None,
    needs: Needs,
) -> GradientSums:
    """Gradients of sum_m (c_m logp_m + e_m H_m); ``stats``, ``grad_logps``, ``grad_entropies`` follow ``order``."""
    sums = GradientSums(needs, head.hidden_ND, head.weight_VD, every_row=order is None)
    ops = row_ops(head.hidden_ND.device, head.weight_VD.dtype)
    for where, index, hidden_nD, tile in head.tiles(order):
        ops.gradient_(
            tile,
            head.bias_V,
            head.targets_N[index],
            head.transform,
            stats.part(where),
            grad_logps[where],
            None if grad_entropies is None else grad_entropies[where],
        )
        sums.add(tile, hidden_nD, index)
    sums.finish()
    return sums


@dataclass(frozen=True)
class LossPass:
    """What one pass gives: vectors follow the order; ``sums`` hold the gradients times ``unit``."""

    losses: Tensor
    stats: RowStats
    sums: GradientSums
    unit: float


def loss_and_gradients(
    head: Head, order: Tensor | None, make_terms: Callable[[], TokenTerms], needs: Needs
) -> LossPass:
    """Token losses, statistics and gradients in one pass; ``make_terms`` gives the terms of the rows in ``order``.

    The terms are made when the first product is under way, which hides their many small operations. Where the loss
    clips, a tile in which many coefficients turn out zero is compacted before its backward products: one look at a
    number on the host for each tile.
    """
    rows = head.hidden_ND.shape[0] if order is None else order.shape[0]
    out = RowStats.empty(rows, head.wide, head.hidden_ND.device)
    losses, c = torch.empty(2, rows, dtype=head.wide, device=head.hidden_ND.device).unbind(0)
    sums = GradientSums(needs, head.hidden_ND, head.weight_VD, every_row=order is None)
    ops = row_ops(head.hidden_ND.device, head.weight_VD.dtype)
    terms, unit = None, 1.0
    for where, index, hidden_nD, tile in head.tiles(order):
        if terms is None:
            terms = make_terms()
            unit = unit_scale(head.weight_VD.dtype, terms.policy_weights * terms.advantages, terms.kl_weights)
        targets = head.targets_N[index]
        ops.loss_(
            tile,
            head.bias_V,
            targets,
            head.transform,
            terms.take(where),
            out.part(where),
            losses[where],
            c[where],
            unit,
        )
        if needs.any:
            kept = compacted(tile, c[where]) if terms.may_clip else None
            _add(sums, tile, hidden_nD, index, kept)
    sums.finish()
    return LossPass(losses, out, sums, unit)


def _add(sums: GradientSums, tile: Tensor, hidden_nD: Tensor, index: slice | Tensor, kept: Tensor | None) -> None:
    """Add a tile's gradient, of all its rows or of those kept at its front."""
    if kept is None:
        sums.add(tile, hidden_nD, index)
        return
    if sums.hidden is not None and isinstance(index, slice):
        sums.hidden[index] = 0
    rows_kept = kept + index.start if isinstance(index, slice) else index[kept]
    sums.add(tile[: kept.shape[0]], hidden_nD[kept], rows_kept)


def compacted(tile: Tensor, coefficients: Tensor) -> Tensor | None:
    """Move the rows with a non-zero coefficient to the front of the tile, in place.

    Returns which row stands at each of the first places, (K,), or ``None`` where it would not pay.
    """
    alive = coefficients != 0
    kept = int(alive.sum())
    rows = tile.shape[0]
    if kept > COMPACT_BELOW * rows:
        return None
    holes = (~alive[:kept]).nonzero().squeeze(1)
    movers = alive[kept:].nonzero().squeeze(1) + kept
    for start in range(0, holes.shape[0], MOVE_ROWS):
        part = slice(start, start + MOVE_ROWS)
        tile[holes[part]] = tile[movers[part]]
    places = torch.arange(kept, device=tile.device)
    places[holes] = movers
    return places
