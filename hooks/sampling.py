"""Sampling as an inference engine does it: logit processing, the kept set, and the log-probs that come back.

Shapes: N sequences decoded together, P prompt tokens, V vocabulary. ``_NV`` marks (N, V).

Source of the semantics: vLLM's sampler with ``logprobs_mode="processed_logprobs"``: repetition penalty, temperature,
min_p, top_k and top_p in this order, then log-softmax over what is kept. A kept set of mass m raises every log-prob by
-log m against the full distribution, so a trainer that scores the same token over the whole vocabulary sees a token
ratio of m.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftscope.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What TRL asks an engine for, by vLLM's names.

    Raises ``UsageError`` for a value outside its domain or a request that this sampler does not serve.
    """

    n: int = 1  # completions per prompt
    temperature: float = 1.0
    top_p: float = 1.0  # smallest set of at least this mass; 1 keeps all
    top_k: int = 0  # 0 or -1 keeps all
    min_p: float = 0.0  # relative to the most likely token
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None  # 0: of the sampled token; None: none
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        domain = {
            "n": self.n >= 1,
            "temperature": self.temperature > 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= -1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "max_tokens": self.max_tokens >= 1,
        }
        for name, valid in domain.items():
            if not valid:
                raise UsageError(f"{name}={getattr(self, name)!r} is outside its domain for sampling.")
        if self.logprobs:
            raise UsageError(
                f"logprobs={self.logprobs}: the stand-in engine returns the sampled token's log-prob only; "
                "use 0 or None."
            )
        if self.structured_outputs is not None:
            raise UsageError("structured_outputs: the stand-in engine has no grammar; leave it unset or use vLLM.")


@dataclass(frozen=True)
class Sampled:
    """One sampled completion: ids, and per token its processed log-prob and its rank (1 is the most likely)."""

    token_ids: list[int]
    logps: list[float]
    ranks: list[int]
    finish_reason: str  # "stop" or "length"


def processed_log_probs(logits_NV: Tensor, params: SamplingParams, seen_NV: Tensor | None = None) -> Tensor:
    """Log-probs (N, V) in nats, float32, of the distribution that is sampled: -inf outside the kept set.

    seen_NV: True for tokens of the prompt and of the completion so far, for the repetition penalty.
    """
    logits = logits_NV.float()
    if params.repetition_penalty != 1.0 and seen_NV is not None:
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen_NV, penalised, logits)
    logits = logits / params.temperature
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[..., -1:], -torch.inf)
    if params.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        dropped[..., -1] = False  # the most likely token always stays
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits.log_softmax(-1)


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    stop_ids: Collection[int],
    max_model_len: int,
    generator: torch.Generator,
) -> list[Sampled]:
    """Decode all prompts together with a key-value cache, one completion a prompt.

    model: a causal language model of transformers, in eval mode. generator: lives on the CPU; no other random state is
    read or written. A stop id ends its completion and is part of it.
    """
    budgets = [min(params.max_tokens, max_model_len - len(p)) for p in prompts]
    device = next(model.parameters()).device
    ids, mask = _left_pad(prompts, device)
    stops = torch.tensor(sorted(stop_ids), device=device, dtype=torch.long)
    seen_NV: Tensor | None = None
    if params.repetition_penalty != 1.0:
        seen_NV = _seen(ids, mask, model.config.vocab_size)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    cache: Any = None
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(max(budgets)):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        logps_NV = processed_log_probs(out.logits[:, -1], params, seen_NV)
        ids = torch.multinomial(logps_NV.exp().cpu(), 1, generator=generator).to(device)
        logp = logps_NV.gather(-1, ids)
        columns.append((ids, logp, (logps_NV > logp).sum(-1, keepdim=True) + 1))
        if seen_NV is not None:
            seen_NV.scatter_(-1, ids, True)
        running &= ~torch.isin(ids.squeeze(-1), stops)
        if not running.any():
            break
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=-1)
        positions = positions[:, -1:] + 1
    tokens, logps, ranks = (torch.cat(column, dim=-1).tolist() for column in zip(*columns, strict=True))
    return [_trim(*row, stop_ids) for row in zip(tokens, logps, ranks, budgets, strict=True)]


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompt ids and attention mask, (N, P); the padding value never reaches an attended position."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def _seen(ids: Tensor, mask: Tensor, vocab: int) -> Tensor:
    """True where a token occurs in the prompt, (N, V)."""
    counts = torch.zeros(ids.shape[0], vocab, dtype=torch.long, device=ids.device)
    return counts.scatter_add_(-1, ids, mask) > 0


def _trim(tokens: list[int], logps: list[float], ranks: list[int], budget: int, stop_ids: Collection[int]) -> Sampled:
    """Cut one row of the batch after its first stop id, or at its budget."""
    ends = [i + 1 for i, token in enumerate(tokens[:budget]) if token in stop_ids]
    end = ends[0] if ends else budget
    return Sampled(tokens[:end], logps[:end], ranks[:end], "stop" if ends else "length")
