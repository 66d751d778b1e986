"""Fused losses: a linear head's log-probs, entropies and GRPO losses without its logits.

    loss = driftscope.kernels.fused_linear_grpo_loss(hidden_BTD, lm_head.weight, completion_ids, batch, spec)

Triton and cuBLAS on a GPU, plain PyTorch in tiles elsewhere. The only place that imports triton or liger_kernel; names
load on first use, so that importing this package loads neither, nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.kernels.directions import Directions, linear_directions
    from driftscope.kernels.grpo import FusedLoss, fused_linear_grpo, fused_linear_grpo_loss
    from driftscope.kernels.logprobs import fused_linear_logprobs

__all__ = [
    "Directions",
    "FusedLoss",
    "fused_linear_grpo",
    "fused_linear_grpo_loss",
    "fused_linear_logprobs",
    "linear_directions",
]

_HOME = {
    "Directions": "driftscope.kernels.directions",
    "FusedLoss": "driftscope.kernels.grpo",
    "fused_linear_grpo": "driftscope.kernels.grpo",
    "fused_linear_grpo_loss": "driftscope.kernels.grpo",
    "fused_linear_logprobs": "driftscope.kernels.logprobs",
    "linear_directions": "driftscope.kernels.directions",
}

__getattr__, __dir__ = lazy_names(globals(), _HOME)
