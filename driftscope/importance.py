"""The importance sampling ratio that corrects for the sampling engine's mismatch with the trained policy.

With ``d_bt = log p_old(y_bt) - log p_sampling(y_bt)`` on trained tokens and 0 elsewhere, the raw ratio is
``exp(d_bt)`` for the token modes and ``exp(sum_t d_bt)`` for the sequence modes. The ``*_truncate`` modes clamp it to
[floor, cap]; the ``*_mask`` modes set it to 0 outside of [floor, cap].

Source: TRL ``GRPOTrainer._generate_and_score_completions`` (0.27.2 and 1.16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.spec import LossSpec


def raw_log_ratio_BT(spec: LossSpec, batch: TokenBatch) -> Tensor:
    """``log(old / sampling)`` of each token, nats, (B, T); 0 at padding and at tool results, which nobody sampled.

    The tool mask always counts here, whether or not the path's loss applies it: the trainer computes the ratio before
    any loss path sees the batch. Tokens that the engine could not score (NaN) give 0, a ratio of 1, as in TRL 1.16.
    ``old_logps_BT`` defaults to ``logps_BT``.

    Raises ``UsageError`` where the batch has no sampling log-probs.
    """
    if batch.sampling_logps_BT is None:
        raise UsageError(
            f"is_mode={spec.is_mode!r} corrects the policy term by the ratio of old to sampling log-probs, and this "
            "batch has no sampling log-probs; give TokenBatch(sampling_logps_BT=...) or is_ratio, or set "
            "is_correction=False."
        )
    old_BT = batch.logps_BT.detach() if batch.old_logps_BT is None else batch.old_logps_BT
    mask_BT = batch.completion_mask_BT
    if batch.tool_mask_BT is not None:
        mask_BT = mask_BT * batch.tool_mask_BT
    return torch.nan_to_num((old_BT - batch.sampling_logps_BT) * mask_BT, nan=0.0)


def importance_ratio(spec: LossSpec, batch: TokenBatch) -> Tensor:
    """The ratio as the loss applies it: (B, T) for the token modes, (B, 1) for the sequence modes.

    Computed from the log-probs, whatever ``batch.is_ratio`` holds and whether or not ``spec.is_correction`` is set.
    Raises ``UsageError`` where the batch has no sampling log-probs.
    """
    level, action = spec.is_mode.split("_")
    log_ratio = raw_log_ratio_BT(spec, batch)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    floor = -torch.inf if spec.is_floor is None else spec.is_floor
    cap = torch.inf if spec.is_cap is None else spec.is_cap
    if action == "truncate":
        return ratio.clamp(min=floor, max=cap)
    return ratio.masked_fill((ratio < floor) | (ratio > cap), 0.0)


def applied_ratio(spec: LossSpec, batch: TokenBatch) -> Tensor | None:
    """The ratio in force: ``None`` without a correction, else the batch's own (B, T) or (B, 1), else computed."""
    if not spec.is_correction:
        return None
    if batch.is_ratio is None:
        return importance_ratio(spec, batch)
    return batch.is_ratio.unsqueeze(-1) if batch.is_ratio.dim() == 1 else batch.is_ratio
