"""How a path turns token losses into one number: the divisor of the policy term.

The accumulation divisor is part of it, so paths with and without one compare.
Source: TRL ``GRPOTrainer._compute_loss``; ``length_weighted`` is Liger's luspo.
"""

from __future__ import annotations

from torch import Tensor

from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.masks import counts, policy_mask
from driftscope.spec import LossSpec


def normalizer_value(spec: LossSpec, batch: TokenBatch) -> float | None:
    """The divisor of ``sum_bt mask_bt loss_bt``, accumulation included, tokens (``sequence_sum``: sequences).

    ==========================  =====================================================================
    micro_batch                 trained tokens of the micro-batch * accumulation_steps
    micro_batch_over_ranks      the mean of these tokens over the ranks * accumulation_steps
    max_length                  B * max_completion_length * accumulation_steps
    generation_batch            num_items_in_batch / num_processes
    generation_batch_rescaled   the same * accumulation_steps / steps_per_generation
    sequence_sum                B * accumulation_steps
    sequence, length_weighted   ``None``: every sequence has its own
    ==========================  =====================================================================

    Token counts are at least 1. (TRL until 1.8 has no such bound on ``num_items_in_batch``: it gives NaN at 0.)
    Raises ``UsageError`` where ``max_completion_length``, ``num_items_in_batch`` or ``rank_mean_tokens`` is needed and
    missing.
    """
    mode = spec.effective_normalizer
    sequences = batch.logps_BT.shape[0]
    if mode == "micro_batch":
        return max(float(policy_mask(spec, batch).count_nonzero()), 1.0) * spec.accumulation_steps
    if mode == "micro_batch_over_ranks":
        return max(_rank_mean(spec, batch), 1.0) * spec.accumulation_steps
    if mode == "max_length":
        return float(sequences * _max_completion_length(spec) * spec.accumulation_steps)
    if mode == "sequence_sum":
        return float(sequences * spec.accumulation_steps)
    if mode in ("generation_batch", "generation_batch_rescaled"):
        tokens = max(_num_items(spec, batch), 1.0) / spec.num_processes
        if mode == "generation_batch":
            return tokens
        return tokens * spec.accumulation_steps / (spec.steps_per_generation or spec.accumulation_steps)
    return None


def normalize(spec: LossSpec, batch: TokenBatch, token_loss: Tensor, mask_BT: Tensor) -> Tensor:
    """The policy term of the loss, a scalar, from token losses (B, T) or (B, 1).

    ``length_weighted`` weighs each token loss by its sequence's length before it averages over all positions: with
    (B, T) token losses the padding counts too, as upstream.
    """
    divisor = normalizer_value(spec, batch)
    if divisor is not None:
        return (token_loss * mask_BT).sum() / divisor
    if spec.effective_normalizer == "sequence":
        return ((token_loss * mask_BT).sum(-1) / counts(mask_BT)).mean() / spec.accumulation_steps
    return (token_loss * mask_BT.sum(-1, keepdim=True)).mean() / spec.accumulation_steps


def _max_completion_length(spec: LossSpec) -> int:
    if spec.max_completion_length is None:
        raise UsageError(
            f"loss_type={spec.loss_type!r} with the 'max_length' normaliser divides by B * max_completion_length, "
            "which the spec does not set; give LossSpec(max_completion_length=...), the trainer's limit in tokens."
        )
    return spec.max_completion_length


def _rank_mean(spec: LossSpec, batch: TokenBatch) -> float:
    if batch.rank_mean_tokens is None:
        raise UsageError(
            "the 'micro_batch_over_ranks' normaliser divides by the mean of the ranks' trained tokens, which this "
            "batch does not say; give TokenBatch(rank_mean_tokens=...), or set normalizer='micro_batch'."
        )
    return batch.rank_mean_tokens[0 if spec.tool_mask else 1]


def _num_items(spec: LossSpec, batch: TokenBatch) -> float:
    if batch.num_items_in_batch is None:
        raise UsageError(
            f"loss_type={spec.loss_type!r} with the {spec.effective_normalizer!r} normaliser divides by the trained "
            "tokens of the whole generation batch, which this batch does not say; give "
            "TokenBatch(num_items_in_batch=...), or set normalizer='micro_batch'."
        )
    return float(batch.num_items_in_batch)
