"""The GRPO family's losses on a fused linear head: one pass where a token's coefficient is its own affair, else two.

Shapes: B sequences, T completion tokens, N = B * T, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftscope.algebra import coefficients
from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.kernels.gemms import Needs
from driftscope.kernels.head import (
    HeadTransform,
    check_inputs,
    compute_dtype,
    default_workspace_bytes,
    statistics_dtype,
)
from driftscope.kernels.logprobs import fused_linear_logprobs, trains
from driftscope.kernels.passes import Head, loss_and_gradients, statistics
from driftscope.kernels.scaling import scaled
from driftscope.kernels.token_terms import TokenTerms, active_tokens, is_token_local, token_terms
from driftscope.spec import LossSpec


@dataclass(frozen=True)
class FusedLoss:
    """A loss that can be differentiated, and what it was computed from.

    logps_BT: log-probs of the completion tokens, 0 elsewhere. entropies_BT: their entropies, nats. Both detached.
    """

    loss: Tensor
    logps_BT: Tensor
    entropies_BT: Tensor


def fused_linear_grpo_loss(
    hidden_BTD: Tensor,
    weight: Tensor,
    targets_BT: Tensor,
    batch: TokenBatch,
    spec: LossSpec,
    *,
    bias: Tensor | None = None,
    workspace_bytes: int | None = None,
) -> Tensor:
    """The loss that ``spec`` describes, a scalar, differentiable once by hidden, weight and bias.

    hidden_BTD: hidden states at the positions that predict the completion tokens. weight (V, D), bias (V,): the head.
    targets_BT: the completion tokens. batch: masks, advantages and the other models' log-probs; its ``logps_BT`` and
    ``entropies_BT`` are not read, the head's own take their place. The spec's temperature, softcap and scale apply.
    workspace_bytes: memory of the logits tile; ``None`` chooses.

    Tokens whose coefficient is known to be zero - padding, masked tokens, zero advantages - are not even projected.
    Raises ``UsageError`` for what the spec needs and the batch lacks, and for shapes that do not match.
    """
    return _fused(hidden_BTD, weight, targets_BT, batch, spec, bias, workspace_bytes, every_token=False).loss


def fused_linear_grpo(
    hidden_BTD: Tensor,
    weight: Tensor,
    targets_BT: Tensor,
    batch: TokenBatch,
    spec: LossSpec,
    *,
    bias: Tensor | None = None,
    workspace_bytes: int | None = None,
) -> FusedLoss:
    """As ``fused_linear_grpo_loss``, with log-probs and entropies of every completion token beside the loss.

    Completion tokens without a gradient cost one product instead of three.
    """
    return _fused(hidden_BTD, weight, targets_BT, batch, spec, bias, workspace_bytes, every_token=True)


def _fused(
    hidden_BTD: Tensor,
    weight: Tensor,
    targets_BT: Tensor,
    batch: TokenBatch,
    spec: LossSpec,
    bias: Tensor | None,
    workspace_bytes: int | None,
    *,
    every_token: bool,
) -> FusedLoss:
    """Choose between one pass and two."""
    if spec.head_adapter:
        raise UsageError(
            "head_adapter=True: the fused head has no adapter of its own; give the weight that the adapter makes, "
            "W + scaling * B @ A, and set head_adapter=False."
        )
    if hidden_BTD.dim() != 3 or tuple(targets_BT.shape) != tuple(hidden_BTD.shape[:2]):
        raise UsageError(
            f"hidden_BTD has shape {tuple(hidden_BTD.shape)} and targets_BT {tuple(targets_BT.shape)}; expected "
            "(B, T, D) and (B, T)."
        )
    transform = HeadTransform(temperature=spec.temperature, softcap=spec.logit_softcap, logit_scale=spec.logit_scale)
    hidden = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    check_inputs(hidden, weight, targets_BT.reshape(-1), bias)
    dtype = compute_dtype(hidden_BTD, weight)
    if workspace_bytes is None:
        workspace_bytes = default_workspace_bytes(weight, trainable=trains(weight))
    blank = torch.zeros(targets_BT.shape, device=hidden.device)
    batch = replace(batch, logps_BT=blank, entropies_BT=None)
    if not is_token_local(spec, batch):
        return _two_passes(hidden_BTD, weight, targets_BT, batch, spec, bias, transform, workspace_bytes)
    plan = _Plan(
        batch=batch,
        spec=spec,
        targets=targets_BT.reshape(-1),
        transform=transform,
        workspace_bytes=workspace_bytes,
        dtype=dtype,
        report=every_token,
    )
    differentiable = (t if trains(t) else None if t is None else t.detach() for t in (hidden, weight, bias))
    loss, logps, entropies = _OnePass.apply(*differentiable, plan)  # type: ignore[no-untyped-call]
    return FusedLoss(loss, logps.view(targets_BT.shape), entropies.view(targets_BT.shape))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one pass needs beside the tensors that it differentiates by."""

    batch: TokenBatch
    spec: LossSpec
    targets: Tensor
    transform: HeadTransform
    workspace_bytes: int
    dtype: torch.dtype
    report: bool  # log-probs of every completion token are wanted, with or without a gradient

    def terms(self, order: Tensor | None) -> TokenTerms:
        """The algebra's vectors for the rows in ``order``."""
        terms = token_terms(self.spec, self.batch.to(statistics_dtype(self.dtype)))
        return terms if order is None else terms.take(order)


class _OnePass(torch.autograd.Function):
    """hidden (N, D), weight (V, D), bias (V,) -> loss, log-probs (N,), entropies (N,).

    The gradients are made in the forward, where the logits are; the backward only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = Needs(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, plan.targets, plan.transform, plan.workspace_bytes, plan.dtype)
            active = active_tokens(plan.spec, plan.batch)
            chosen = active.nonzero().squeeze(1)
            order = None if chosen.shape[0] == active.shape[0] else chosen
            silent = None
            if plan.report and order is not None:
                silent = ((plan.batch.completion_mask_BT.reshape(-1) != 0) & ~active).nonzero().squeeze(1)
            found = loss_and_gradients(head, order, lambda: plan.terms(order), needs)
            logps, entropies = found.stats.logps, found.stats.entropies
            if order is not None:
                logps, entropies = (v.new_zeros(active.shape[0]).index_copy_(0, order, v) for v in (logps, entropies))
            if silent is not None and silent.shape[0]:
                rest = statistics(head, silent)
                logps.index_copy_(0, silent, rest.logps)
                entropies.index_copy_(0, silent, rest.entropies)
        ctx.mark_non_differentiable(logps, entropies)
        ctx.save_for_backward(found.sums.hidden, found.sums.weight, found.sums.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else weight.dtype)
        ctx.unit = found.unit
        return found.losses.sum(dtype=torch.float64).to(found.losses.dtype), logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        factor = grad_loss / ctx.unit
        grads = (scaled(t, factor, d) for t, d in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return (*grads, None)


def _two_passes(
    hidden_BTD: Tensor,
    weight: Tensor,
    targets_BT: Tensor,
    batch: TokenBatch,
    spec: LossSpec,
    bias: Tensor | None,
    transform: HeadTransform,
    workspace_bytes: int,
) -> FusedLoss:
    """Log-probs first, then the algebra on (B, T) in float64, then the gradient of what has a coefficient."""
    mask_BT = None if spec.effective_normalizer == "length_weighted" else batch.completion_mask_BT
    logps_BT, entropies_BT = fused_linear_logprobs(
        hidden_BTD,
        weight,
        targets_BT,
        bias=bias,
        temperature=transform.temperature,
        softcap=transform.softcap,
        logit_scale=transform.logit_scale,
        with_entropy=True,
        mask=mask_BT,
        workspace_bytes=workspace_bytes,
    )
    assert entropies_BT is not None
    seen_BT = logps_BT.detach()
    if mask_BT is not None and batch.old_logps_BT is not None:
        # A token that was not computed stands at a ratio of 1.
        seen_BT = torch.where(mask_BT != 0, seen_BT, batch.old_logps_BT.to(seen_BT.dtype))
    full = replace(batch, logps_BT=seen_BT, entropies_BT=entropies_BT.detach())
    found = coefficients(spec, full, torch.float64)
    loss = _KnownGradient.apply(  # type: ignore[no-untyped-call]
        logps_BT, entropies_BT, logps_BT.new_tensor(found.loss), found.logps_BT, found.entropies_BT
    )
    return FusedLoss(loss, logps_BT.detach(), entropies_BT.detach())


class _KnownGradient(torch.autograd.Function):
    """A loss whose derivatives by log-probs and entropies are known."""

    @staticmethod
    def forward(
        ctx: Any, logps_BT: Tensor, entropies_BT: Tensor, loss: Tensor, c_BT: Tensor, e_BT: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(c_BT, e_BT)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        c_BT, e_BT = ctx.saved_tensors
        narrow = grad_loss.dtype
        c = (c_BT * grad_loss).to(narrow)
        return c, None if e_BT is None else (e_BT * grad_loss).to(narrow), None, None, None
