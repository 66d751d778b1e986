"""The directions in hidden space along which a token's log-prob and entropy grow, without the logits: one pass.

With both the log-prob and its gradient for a coefficient of 1 made from one tile of logits, and no gradient of the
weight, a tile costs two products. Shapes: N tokens, D hidden size, V vocabulary.

    u = dlogp/dh = slope (W[target] - sum_v p_v W_v),  w = dH/dh
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from driftscope.kernels.gemms import wide_product_
from driftscope.kernels.head import (
    HeadTransform,
    check_inputs,
    compute_dtype,
    default_workspace_bytes,
)
from driftscope.kernels.passes import Head
from driftscope.kernels.row_stats import RowStats
from driftscope.kernels.rows import row_ops


@dataclass(frozen=True)
class Directions:
    """What a linear head says about N tokens; float32, or float64 for float64 inputs, all detached."""

    u_ND: Tensor  # dlogp/dhidden
    w_ND: Tensor | None  # dH/dhidden, where asked for
    logps_N: Tensor
    entropies_N: Tensor  # nats


DirectionsOf = Callable[[Tensor, Tensor, bool], Directions]  # hidden (n, D), targets (n,), whether w is wanted


@torch.no_grad()
def linear_directions(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    workspace_bytes: int | None = None,
) -> Directions:
    """Log-probs of the targets, entropies, and their derivatives by the hidden states, row by row.

    hidden (N, D), weight (V, D), bias (V,), targets (N,); the head as in ``fused_linear_logprobs``. The products run
    in hidden's and weight's dtype, or autocast's: the gradient by the logits is rounded to it, as a backward pass
    would, and u and w are not rounded again. ``with_entropy``: w too, a third product and a second tile.
    workspace_bytes: memory of the logits tiles; ``None`` chooses.

    Nothing is recorded for autograd, and no gradient of weight or bias is computed.
    Raises ``UsageError`` for shapes that do not match and for a workspace of less than one row.
    """
    check_inputs(hidden, weight, targets, bias)
    transform = HeadTransform(temperature=temperature, softcap=softcap, logit_scale=logit_scale)
    if workspace_bytes is None:
        workspace_bytes = default_workspace_bytes(weight, trainable=False)
    dtype = compute_dtype(hidden, weight)
    tile_bytes = workspace_bytes // 2 if with_entropy else workspace_bytes
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head.of(hidden, weight, bias, targets, transform, tile_bytes, dtype)
        return _with_entropy(head) if with_entropy else _of_log_probs(head)


def _of_log_probs(head: Head) -> Directions:
    stats, u_ND = _room(head)
    ops = row_ops(head.hidden_ND.device, head.weight_VD.dtype)
    for where, _, _, tile in head.tiles(None):
        ops.stats_gradient_(tile, head.bias_V, head.targets_N[where], head.transform, stats.part(where))
        wide_product_(u_ND[where], tile, head.weight_VD)
    return Directions(u_ND, None, stats.logps, stats.entropies)


def _with_entropy(head: Head) -> Directions:
    stats, u_ND = _room(head)
    w_ND = torch.empty_like(u_ND)
    ops = row_ops(head.hidden_ND.device, head.weight_VD.dtype)
    ones = torch.ones_like(stats.logps)
    spare: Tensor | None = None
    for where, _, _, tile in head.tiles(None):
        targets, part = head.targets_N[where], stats.part(where)
        ops.stats(tile, head.bias_V, targets, head.transform, part)
        if spare is None:
            spare = tile.new_empty(tile.shape[0], tile.stride(0))
        other = spare[: tile.shape[0], : tile.shape[1]].copy_(tile)
        one = ones[where]
        ops.gradient_(tile, head.bias_V, targets, head.transform, part, one, None)
        wide_product_(u_ND[where], tile, head.weight_VD)
        ops.gradient_(other, head.bias_V, targets, head.transform, part, torch.zeros_like(one), one)
        wide_product_(w_ND[where], other, head.weight_VD)
    return Directions(u_ND, w_ND, stats.logps, stats.entropies)


def _room(head: Head) -> tuple[RowStats, Tensor]:
    """Memory for the statistics and for one direction, uninitialised."""
    rows, size = head.hidden_ND.shape
    device = head.hidden_ND.device
    return RowStats.empty(rows, head.wide, device), torch.empty(rows, size, dtype=head.wide, device=device)
