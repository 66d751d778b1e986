"""What the loss algebra sees of one micro-batch, and what it gives back.

Shapes: B sequences, T completion tokens. ``_BT`` marks (B, T), ``_B1`` (B, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Inputs of the loss algebra for one micro-batch.

    logps_BT: log-prob of each sampled token under the policy being trained (temperature applied).
    completion_mask_BT: 1 for completion tokens, 0 for padding.
    advantages: (B,) or (B, 1) or (B, T).
    old_logps_BT: log-probs at generation time; ``None`` means on-policy (equal to ``logps_BT``, no gradient).
    ref_logps_BT: log-probs of the KL reference model; needed where ``beta != 0``.
    sampling_logps_BT: log-probs that the sampling engine returned.
    tool_mask_BT: 1 for model tokens, 0 for tool results; ``None`` where there are no tools.
    entropies_BT: entropy of the next-token distribution, nats.
    is_ratio: applied importance sampling ratio, (B, T) for token modes or (B, 1) for sequence modes.
    num_items_in_batch: trained tokens of the whole generation batch over all processes.
    rank_mean_tokens: tokens of this micro-batch, the mean over the ranks of a distributed run: (with the tool mask,
        without it); ``None`` in one process.
    """

    logps_BT: Tensor
    completion_mask_BT: Tensor
    advantages: Tensor
    old_logps_BT: Tensor | None = None
    ref_logps_BT: Tensor | None = None
    sampling_logps_BT: Tensor | None = None
    tool_mask_BT: Tensor | None = None
    entropies_BT: Tensor | None = None
    is_ratio: Tensor | None = None
    num_items_in_batch: float | None = None
    rank_mean_tokens: tuple[float, float] | None = None

    def to(self, dtype: torch.dtype) -> TokenBatch:
        """A copy whose floating tensors are detached and of ``dtype``; masks become ``dtype`` too."""
        changes = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and hasattr(value, "detach"):
                changes[field.name] = value.detach().to(dtype)
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """A loss path on one micro-batch: the loss and its derivatives by the log-probs and the entropies.

    logps_BT: dL/dlogp, (B, T). entropies_BT: dL/dentropy, (B, T), or ``None`` where the loss has no entropy term.
    normalizer: the divisor of the policy term that the loss used, or ``None`` where it is not one number.
    """

    loss: float
    logps_BT: Tensor
    entropies_BT: Tensor | None = None
    normalizer: float | None = None
