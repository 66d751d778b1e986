"""Fused losses: a linear head's log-probs, entropies and GRPO losses without its logits.

    loss = driftscope.kernels.fused_linear_grpo_loss(hidden_BTD, lm_head.weight, completion_ids, batch, spec)

Triton and cuBLAS on a GPU, plain PyTorch in tiles elsewhere. The only place that imports triton or liger_kernel; names
load on first use, so that importing this package loads neither, nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftscope.kernels.grpo import FusedLoss, fused_linear_grpo, fused_linear_grpo_loss
    from driftscope.kernels.logprobs import fused_linear_logprobs

__all__ = ["FusedLoss", "fused_linear_grpo", "fused_linear_grpo_loss", "fused_linear_logprobs"]

_HOME = {
    "FusedLoss": "driftscope.kernels.grpo",
    "fused_linear_grpo": "driftscope.kernels.grpo",
    "fused_linear_grpo_loss": "driftscope.kernels.grpo",
    "fused_linear_logprobs": "driftscope.kernels.logprobs",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
