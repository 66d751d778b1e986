"""The row operations in plain PyTorch: for the CPU, for float64, and to read beside the Triton kernels.

Each holds a few temporaries of the tile's size.
"""

from __future__ import annotations

from torch import Tensor

from driftscope.kernels.head import HeadTransform, statistics_dtype
from driftscope.kernels.row_stats import RowStats
from driftscope.kernels.token_terms import TokenTerms, token_losses


def _raw(tile: Tensor, bias: Tensor | None) -> Tensor:
    wide = tile.to(statistics_dtype(tile.dtype))
    return wide if bias is None else wide + bias


def stats(tile: Tensor, bias: Tensor | None, targets: Tensor, transform: HeadTransform, out: RowStats) -> None:
    """Fill ``out`` from a tile of raw logits (n, V)."""
    z = transform.logits(_raw(tile, bias))
    out.peaks.copy_(z.amax(-1))
    z = z - out.peaks[:, None]
    out.logsums.copy_(z.exp().sum(-1).log())
    log_p = z - out.logsums[:, None]
    out.logps.copy_(log_p.gather(-1, targets[:, None]).squeeze(-1))
    p = log_p.exp()
    out.entropies.copy_(-(p * log_p).masked_fill_(p == 0, 0.0).sum(-1))


def gradient_(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    stats: RowStats,
    grad_logps: Tensor,
    grad_entropies: Tensor | None,
) -> None:
    """Overwrite raw logits (n, V) by the gradient of sum_n (c logp + e H)."""
    raw = _raw(tile, bias)
    log_p = transform.logits(raw) - stats.peaks[:, None] - stats.logsums[:, None]
    p = log_p.exp()
    grad = -grad_logps[:, None] * p
    grad.scatter_add_(1, targets[:, None], grad_logps[:, None])
    if grad_entropies is not None:
        inner = (log_p + stats.entropies[:, None]).masked_fill_(p == 0, 0.0)
        grad -= grad_entropies[:, None] * p * inner
    tile.copy_(grad * transform.slope(raw))


def stats_gradient_(
    tile: Tensor, bias: Tensor | None, targets: Tensor, transform: HeadTransform, out: RowStats
) -> None:
    """Fill ``out``, and overwrite raw logits (n, V) by the gradient of sum_n logp."""
    stats(tile, bias, targets, transform, out)
    gradient_(tile, bias, targets, transform, out, out.logps.new_ones(out.logps.shape), None)


def loss_(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    terms: TokenTerms,
    out: RowStats,
    losses: Tensor,
    grad_logps: Tensor,
    scale: float,
) -> None:
    """Statistics, token losses and coefficients, and the gradient times ``scale`` in place of the logits."""
    stats(tile, bias, targets, transform, out)
    value, c, e = token_losses(terms, out.logps, out.entropies)
    losses.copy_(value)
    grad_logps.copy_(c)
    gradient_(tile, bias, targets, transform, out, c * scale, e * scale if e is not None else None)
