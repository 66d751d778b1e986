"""Batches that do not depend on how many processes train: the same sequences in the same micro-batches."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
from torch import Tensor

SHORTEST = 4


def completion(prompt: list[int], copy: int, *, words: int, length: int, eos: int) -> list[int]:
    """A completion that depends on its prompt and the index of its copy alone; some end early, with the end token."""
    chance = random.Random(f"{prompt}/{copy}")
    wanted = chance.randint(SHORTEST, length + 2)
    ids = [chance.randrange(words) for _ in range(min(wanted, length))]
    return ids if wanted > length else [*ids[:-1], eos]


def log_ratio_BT(ids_BT: Tensor, size: float) -> Tensor:
    """A log importance sampling ratio within ``size`` of 0, made of the token ids alone."""
    return size * ((ids_BT * 7919 % 101).float() / 50 - 1)


def fixed_completions(trainer: Any, *, processes: int, words: int) -> None:
    """Let the trainer's generation answer ``completion``; its weights and the sampling engine are not asked."""
    tokenizer = trainer.processing_class
    takes_ids = "prompt_ids" in inspect.signature(trainer._generate_single_turn).parameters
    rank = trainer.accelerator.process_index

    def answers(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        first = rank * len(prompts)
        ids = [
            completion(
                prompt,
                (first + i) % trainer.num_generations,
                words=words,
                length=trainer.max_completion_length,
                eos=tokenizer.eos_token_id,
            )
            for i, prompt in enumerate(prompts)
        ]
        return ids, [[0.0] * len(row) for row in ids] if trainer.use_vllm else None

    def from_texts(prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids = [list(tokenizer(text)["input_ids"]) for text in prompts]
        return (prompt_ids, *answers(prompt_ids), {})

    def from_ids(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[Any, ...]:
        return answers(prompt_ids)

    trainer._generate_single_turn = from_ids if takes_ids else from_texts


def fixed_order(trainer: Any, *, processes: int) -> None:
    """Leave out the shuffle of a generation's sequences, and cut it as ``processes`` processes would.

    Rows of one process that stands for several: those of the first micro-batch of every process come first.
    """
    module = inspect.getmodule(type(trainer)._prepare_inputs)
    assert module is not None
    module.__dict__["shuffle_sequence_dict"]  # the name must be there to be replaced
    micro = trainer.args.per_device_train_batch_size // processes

    def in_order(batch: dict[str, Any]) -> dict[str, Any]:
        rows = batch["completion_ids"].shape[0]
        order = torch.arange(rows).view(processes, -1, micro).transpose(0, 1).reshape(-1)
        return {k: v[order] if isinstance(v, Tensor) and v.ndim > 0 else v for k, v in batch.items()}

    module.__dict__["shuffle_sequence_dict"] = in_order if processes > 1 else dict


def injected_ratio(trainer: Any, size: float) -> None:
    """Put sampling log-probs and importance sampling ratios of ``log_ratio_BT`` into every generated batch."""
    own = trainer._generate_and_score_completions

    def generate(inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = own(inputs)
        log_BT = log_ratio_BT(batch["completion_ids"], size) * batch["completion_mask"]
        assert batch["sampling_per_token_logps"].shape == log_BT.shape
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] - log_BT
        mode = trainer.vllm_importance_sampling_mode
        cap = getattr(trainer, "vllm_importance_sampling_clip_max", None)
        cap = getattr(trainer, "vllm_importance_sampling_cap", None) if cap is None else cap
        ratio = (log_BT.sum(-1, keepdim=True) if mode.startswith("sequence") else log_BT).exp()
        over = ratio > cap if cap is not None else torch.zeros_like(ratio, dtype=torch.bool)
        batch["importance_sampling_ratio"] = (
            ratio.masked_fill(over, 0.0) if mode.endswith("mask") else ratio.clamp(max=cap)
        )
        return batch

    trainer._generate_and_score_completions = generate
