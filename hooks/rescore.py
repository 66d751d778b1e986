"""Scoring sampled tokens again, by the trainer's own code, on a few sequences and under other circumstances.

Shapes: B sequences, T completion tokens, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.hooks import adapters
from driftscope.hooks.capture import rng_kept

PER_SEQUENCE = 64
"""Tokens of one sequence that are scored again: more sequences tell more than longer ones, and cost less."""


@dataclass(frozen=True)
class Tokens:
    """A few sequences of a batch, and the completion tokens of them that count."""

    ids_BL: Tensor
    attention_BL: Tensor
    keep_BT: Tensor
    """(b, t): the sequences that were chosen, and the first columns of the completion."""
    rows: Tensor
    """Indices of the sequences in the batch."""

    def of(self, values_BT: Tensor) -> Tensor:
        """The values of the chosen tokens, (N,) or (N, D), from those of the whole batch."""
        chosen: Tensor = values_BT[self.rows, : self.keep_BT.shape[1]][self.keep_BT]
        return chosen


def choose(inputs: adapters.Inputs, limit: int) -> Tokens | None:
    """About ``limit`` trained tokens from the beginnings of sequences, evenly over the batch.

    At most ``PER_SEQUENCE`` of a sequence where there are enough sequences. ``None`` for an empty batch.
    """
    mask = adapters.policy_mask(inputs).bool()
    lengths = mask.sum(-1)
    filled = lengths.nonzero()[:, 0]
    if not len(filled):
        return None
    each = min(max(float(lengths[filled].double().mean()), 1.0), float(PER_SEQUENCE))
    count = min(len(filled), max(2, round(limit / each)))
    at = torch.linspace(0, len(filled) - 1, count).round().long().unique()
    rows = filled[at.to(filled.device)]
    columns = max(PER_SEQUENCE, -(-limit // count))
    keep = mask[rows, :columns]
    return Tokens(
        ids_BL=torch.cat([inputs["prompt_ids"][rows], inputs["completion_ids"][rows, :columns]], 1),
        attention_BL=torch.cat([inputs["prompt_mask"][rows], inputs["completion_mask"][rows, :columns]], 1),
        keep_BT=keep,
        rows=rows,
    )


class Scorer:
    """Log-probs (N,) of chosen tokens by the trainer's own method, in evaluation mode, without a trace."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)

    def score(self, tokens: Tokens, *, batch_size: int | None = None) -> Tensor:
        """Log-probs of the tokens under the weights as they are now, float64. batch_size: sequences at a time."""
        length = tokens.keep_BT.shape[1]
        device = self.trainer.accelerator.device
        with torch.no_grad(), evaluating(self.model), rng_kept(device), adapters.autocast(self.trainer):
            answer = self.trainer._get_per_token_logps_and_entropies(
                self.model, tokens.ids_BL, tokens.attention_BL, length, batch_size=batch_size
            )
        logps: Tensor = answer["logps"] if isinstance(answer, dict) else answer[0]
        return logps[tokens.keep_BT].double()

    def score_otherwise(self, tokens: Tokens) -> Tensor:
        """As ``score``, one sequence at a time and with attention in another order: only rounding may differ.

        torch's choice of attention kernels is afterwards as it was (seen on an H200, its order of them included).
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):
            return self.score(tokens, batch_size=1)

    def score_coarsely(self, tokens: Tokens) -> Tensor:
        """As ``score``, computed in bfloat16: what a sampling engine in that format would differ by."""
        kind = self.trainer.accelerator.device.type
        with torch.autocast(kind, dtype=torch.bfloat16):
            return self.score(tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; each module's own mode again afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model without its PEFT adapters."""
    with model.disable_adapter():
        yield


def has_adapters(model: Any) -> bool:
    """Whether the model is PEFT's, so that its adapters can be switched off."""
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")
