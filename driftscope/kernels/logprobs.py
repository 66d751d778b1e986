"""Log-probs and entropies of a linear head without its logits: two passes, any loss on top."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftscope.kernels.gemms import Needs
from driftscope.kernels.head import HeadTransform, check_inputs, compute_dtype, default_workspace_bytes
from driftscope.kernels.passes import Head, gradients, statistics
from driftscope.kernels.row_stats import RowStats
from driftscope.kernels.scaling import scaled, unit_scale


def fused_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    mask: Tensor | None = None,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the targets and, where asked for, entropies in nats; never more than a tile of the logits.

        z = transform(h W^T + bias),  logp = z[target] - logsumexp(z),  H = logsumexp(z) - sum_v p_v z_v

    hidden (..., D), weight (V, D), bias (V,), targets (...) with hidden's leading shape; the results have that shape,
    float32 (float64 for float64 inputs). Differentiable once by hidden, weight and bias; the backward recomputes the
    logits, for rows with a non-zero gradient only. A weight that is itself computed, such as W + s B A of an adapter,
    passes its gradient on.

    temperature, softcap, logit_scale: z = softcap tanh(logit_scale x / softcap) / temperature.
    mask: (...), rows where it is zero are not computed: log-prob and entropy 0, no gradient.
    workspace_bytes: memory of the logits tile; ``None`` chooses (``head.default_workspace_bytes``).

    The products run in hidden's and weight's dtype, or autocast's; the weight's gradient is summed in float32.
    Raises ``UsageError`` for shapes that do not match and for a workspace of less than one row.
    """
    shape = targets.shape
    flat = hidden.reshape(-1, hidden.shape[-1])
    check_inputs(flat, weight, targets.reshape(-1), bias)
    transform = HeadTransform(temperature=temperature, softcap=softcap, logit_scale=logit_scale)
    if workspace_bytes is None:
        workspace_bytes = default_workspace_bytes(weight, trainable=trains(weight))
    order = None if mask is None else mask.reshape(-1).nonzero().squeeze(1)
    logps, entropies = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, targets.reshape(-1), transform, workspace_bytes, order, compute_dtype(hidden, weight)
    )
    return logps.view(shape), entropies.view(shape) if with_entropy else None


def trains(tensor: Tensor | None) -> bool:
    """Whether this call must prepare the tensor's gradient."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


class _LinearLogProbs(torch.autograd.Function):
    """hidden (N, D), weight (V, D), bias (V,) -> log-probs (N,), entropies (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        workspace_bytes: int,
        order: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, targets, transform, workspace_bytes, dtype)
            found = statistics(head, order)
            logps, entropies = _spread(found.logps, order, hidden), _spread(found.entropies, order, hidden)
        ctx.save_for_backward(hidden, weight, bias, targets, order, found.entropies, found.peaks, found.logsums)
        ctx.settings = (transform, workspace_bytes, dtype)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, order, entropies, peaks, logsums = ctx.saved_tensors
        transform, workspace_bytes, dtype = ctx.settings
        needs = Needs(*ctx.needs_input_grad[:3])
        nothing = (None,) * 5
        if grad_logps is None and grad_entropies is None:
            return None, None, None, *nothing
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, targets, transform, workspace_bytes, dtype)
            c = _gathered(grad_logps, order, entropies)
            e = None if grad_entropies is None else _gathered(grad_entropies, order, entropies)
            alive = c != 0 if e is None else (c != 0) | (e != 0)
            stats = RowStats(entropies, entropies, peaks, logsums)
            if not bool(alive.all()):
                chosen = alive.nonzero().squeeze(1)
                order = chosen if order is None else order[chosen]
                stats = RowStats(*(v[chosen] for v in (entropies, entropies, peaks, logsums)))
                c, e = c[chosen], None if e is None else e[chosen]
            unit = unit_scale(dtype, c, e)
            sums = gradients(head, order, stats, c * unit, None if e is None else e * unit, needs)
            factor = None if unit == 1.0 else torch.full((), 1.0 / unit, dtype=head.wide, device=hidden.device)
            return (
                scaled(sums.hidden, factor, hidden.dtype),
                scaled(sums.weight, factor, weight.dtype),
                scaled(sums.bias, factor, bias.dtype) if bias is not None else None,
                *nothing,
            )


def _spread(values: Tensor, order: Tensor | None, hidden: Tensor) -> Tensor:
    """Values of the rows in ``order`` at their places among all rows; zero elsewhere."""
    if order is None:
        return values.clone()
    return values.new_zeros(hidden.shape[0]).index_copy_(0, order, values)


def _gathered(grad: Tensor | None, order: Tensor | None, like: Tensor) -> Tensor:
    """A gradient over all rows as one over the rows in ``order``; zeros where there is none."""
    if grad is None:
        return torch.zeros_like(like)
    flat = grad.to(like.dtype)
    return (flat if order is None else flat[order]).contiguous()
