"""Random micro-batches on which every term of the loss acts: shared by the tests of the loss algebra."""

from __future__ import annotations

import torch

from driftscope.batch import TokenBatch

B, T = 6, 7
LENGTHS = (7, 4, 1, 6, 0, 5)  # uneven, one sequence of one token, one fully masked row
ADVANTAGES = (1.3, -0.8, 0.0, 0.6, -1.1, -2.0)
RANK_MEAN_TOKENS = (11.5, 12.5)  # with the tool mask, and without
NUM_ITEMS = 57
MAX_LENGTH = 11


def random_batch(
    seed: int, *, on_policy: bool = False, tools: bool = False, token_advantages: bool = False
) -> TokenBatch:
    """A float64 batch whose ratios are far enough off-policy that clipping, delta, caps and thresholds act.

    Masks are integer tensors, as the trainer's own.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(B, T, generator=g, dtype=torch.float64) * scale

    logps_BT = -normal(1.0).abs() - 0.1
    old_BT = logps_BT + normal(0.5)
    mask_BT = (torch.arange(T)[None, :] < torch.tensor(LENGTHS)[:, None]).long()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    tool_mask_BT = torch.ones(B, T, dtype=torch.long)
    tool_mask_BT[0, 2:5] = 0  # a tool result in the middle
    tool_mask_BT[2, :] = 0  # a sequence of which nothing is left
    return TokenBatch(
        logps_BT=logps_BT,
        completion_mask_BT=mask_BT,
        advantages=advantages[:, None] + normal(0.5) if token_advantages else advantages,
        old_logps_BT=None if on_policy else old_BT,
        ref_logps_BT=logps_BT + normal(0.4),
        sampling_logps_BT=old_BT + normal(0.3),
        tool_mask_BT=tool_mask_BT if tools else None,
        entropies_BT=normal(1.0).abs(),
        num_items_in_batch=NUM_ITEMS,
        rank_mean_tokens=RANK_MEAN_TOKENS,
    )
