"""Which tokens and sequences the policy term trains on.

Shapes: B sequences, T completion tokens; ``_BT`` marks (B, T), ``_B1`` (B, 1). A mask is 1 where the token counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.spec import LossSpec


def policy_mask(spec: LossSpec, batch: TokenBatch) -> Tensor:
    """Tokens that the loss sums over, (B, T): the completion mask, times the tool mask where the path applies one.

    A batch without a tool mask has no tool results, so there the two are the same.
    """
    if spec.tool_mask and batch.tool_mask_BT is not None:
        return batch.completion_mask_BT * batch.tool_mask_BT
    return batch.completion_mask_BT


def counts(mask_BT: Tensor, *, keepdim: bool = False) -> Tensor:
    """Trained tokens of each sequence, at least 1: (B,), or (B, 1) with ``keepdim``. At least float32, so exact."""
    dtype = torch.promote_types(mask_BT.dtype, torch.float32)
    return mask_BT.sum(-1, keepdim=keepdim, dtype=dtype).clamp(min=1.0)


def off_policy_mask(batch: TokenBatch, mask_BT: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Sequences kept by off-policy sequence masking: (B, 1), or (B, T) with per-token advantages.

    A sequence with a negative advantage is dropped when its mean of ``log(sampling / policy)`` over the trained
    tokens is over ``threshold`` nats. The sampling log-probs are the engine's, else the old ones. Tokens that the
    engine could not score (NaN) count as no evidence, as in TRL 1.16.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), off-policy sequence masking; TRL ``get_off_policy_mask``.
    """
    policy_BT = batch.logps_BT.detach()
    behaviour_BT = batch.sampling_logps_BT
    if behaviour_BT is None:
        behaviour_BT = policy_BT if batch.old_logps_BT is None else batch.old_logps_BT
    drift_BT = torch.nan_to_num(behaviour_BT - policy_BT, nan=0.0)
    drift_B1 = (drift_BT * mask_BT).sum(-1, keepdim=True) / counts(mask_BT, keepdim=True)
    return ((advantages >= 0) | (drift_B1 <= threshold)).to(policy_BT.dtype)


def top_entropy_mask(spec: LossSpec, batch: TokenBatch, mask_BT: Tensor) -> Tensor:
    """Trained tokens in the top ``spec.top_entropy_quantile`` share by entropy, (B, T) boolean.

    The threshold is a float32 quantile whatever the working dtype, as in TRL: the token on the threshold must be
    decided as the trainer decides it. It is taken over this process's micro-batch; TRL gathers those of all processes.

    Source: "Beyond the 80/20 rule" (arXiv:2506.01939); TRL ``get_high_entropy_mask``.
    Raises ``UsageError`` where the batch has no entropies.
    """
    entropies_BT = require_entropies(batch, f"top_entropy_quantile={spec.top_entropy_quantile}").detach()
    kept_BT = mask_BT.bool()
    candidates = entropies_BT[kept_BT].float()
    if candidates.numel() == 0:
        return torch.zeros_like(kept_BT)
    threshold = torch.quantile(candidates, 1.0 - spec.top_entropy_quantile)
    wide_BT = entropies_BT.to(torch.promote_types(entropies_BT.dtype, torch.float32))
    return (wide_BT >= threshold) & kept_BT


def require_entropies(batch: TokenBatch, setting: str) -> Tensor:
    """The batch's entropies, or ``UsageError`` naming the setting that needs them."""
    if batch.entropies_BT is None:
        raise UsageError(
            f"{setting} makes the loss depend on the entropy of each token's distribution, and this batch has none; "
            "give TokenBatch(entropies_BT=...), in nats."
        )
    return batch.entropies_BT
