"""Completions that a policy makes of the trainer's own prompts, and their log-probs as TRL and as float32 have them.

Shapes: B sequences, T completion tokens, N completion tokens of all sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from driftscope.doctor.facts import Settings
from driftscope.hooks import adapters
from driftscope.hooks.sampling import SamplingParams, sample
from driftscope.rules._settings import sampling_values

PROMPTS = 8
COMPLETIONS = 2  # of each prompt
PROMPT_TOKENS = 256
COMPLETION_TOKENS = 32
FLOAT32_BYTES = 4 << 30  # of weights, where a float32 pass needs a copy of them


class CannotBeHad(Exception):
    """The reason why a fact is not measured."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions that the model made itself, with their prompts, left-padded."""

    ids: Tensor  # (B, P+T)
    attention: Tensor
    mask_BT: Tensor


def sample_completions(trainer: Any, model: Any, settings: Settings) -> Sampled:
    """Completions of the trainer's first prompts, sampled as the settings say, with a generator of their own.

    model: in evaluation mode. Raises ``CannotBeHad`` without prompts and for a temperature that is not positive.
    """
    values = sampling_values(settings)
    if values["temperature"] <= 0:
        raise CannotBeHad(f"temperature={values['temperature']:g} is not positive")
    prompts = [_token_ids(trainer, prompt)[-PROMPT_TOKENS:] for prompt in _prompts(trainer)]
    rows = [row for row in prompts for _ in range(COMPLETIONS)]
    tokens = min(COMPLETION_TOKENS, int(settings.get("max_completion_length", COMPLETION_TOKENS)))
    with adapters.autocast(trainer):
        made = sample(
            model,
            rows,
            SamplingParams(max_tokens=tokens, **values),
            stop_ids=_stop_ids(trainer),
            max_model_len=PROMPT_TOKENS + tokens,
            generator=torch.Generator().manual_seed(0),
        )
    width, length = max(map(len, rows)), max(len(one.token_ids) for one in made)
    device = next(model.parameters()).device
    ids, attention, mask = [], [], []
    for row, one in zip(rows, made, strict=True):
        left, right = width - len(row), length - len(one.token_ids)
        ids.append([0] * left + row + one.token_ids + [0] * right)
        attention.append([0] * left + [1] * (len(row) + len(one.token_ids)) + [0] * right)
        mask.append([1] * len(one.token_ids) + [0] * right)
    return Sampled(*(torch.tensor(part, device=device) for part in (ids, attention, mask)))


def _prompts(trainer: Any) -> list[Any]:
    data = trainer.train_dataset
    if data is None:
        raise CannotBeHad("the trainer has no train_dataset to take prompts from")
    found = [row["prompt"] for row in itertools.islice(iter(data), PROMPTS)]
    if not found:
        raise CannotBeHad("the train_dataset is empty")
    return found


def _token_ids(trainer: Any, prompt: Any) -> list[int]:
    """A prompt's token ids: text, or a conversation in the tokenizer's chat template."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    extra = getattr(trainer.args, "chat_template_kwargs", None) or {}
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **extra)
    return list(made["input_ids"])


def _stop_ids(trainer: Any) -> set[int]:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}


def completion_logps(trainer: Any, policy: Any, made: Sampled, exact: bool = False) -> Tensor:
    """TRL's own log-probs (N,) of the completions' tokens, in float64; ``exact`` without mixed precision."""
    twin = adapters.stand_in(trainer)
    with adapters.autocast(trainer):
        answer = twin._get_per_token_logps_and_entropies(
            _Policy(policy, exact), made.ids, made.attention, made.mask_BT.shape[1]
        )
    found: Tensor = answer["logps"] if isinstance(answer, dict) else answer[0]
    return found.double()[made.mask_BT.bool()]


class _Policy:
    """A model as it runs in training, or without mixed precision whatever its caller switches on.

    Under mixed precision accelerate makes what a model answers float32, once training begins. Source:
    ``Accelerator.prepare_model``.
    """

    def __init__(self, model: Any, exact: bool) -> None:
        self._model, self._exact = model, exact

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import convert_to_fp32

        kind = next(self._model.parameters()).device.type
        if self._exact:
            with torch.autocast(kind, enabled=False):
                return self._model(*args, **kwargs)
        answer = self._model(*args, **kwargs)
        return convert_to_fp32(answer) if torch.is_autocast_enabled(kind) else answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """The same parameters with float32 values inside; their own tensors come back."""
    if any(getattr(model, name, False) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")):
        raise CannotBeHad("the weights are quantised, so that there is no float32 pass to compare with")
    low = [p for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32]
    if 4 * sum(p.numel() for p in low) > FLOAT32_BYTES:
        raise CannotBeHad(f"a float32 copy of the weights would take more than {FLOAT32_BYTES >> 30} GiB")
    saved = [p.data for p in low]
    prepared = model.__dict__.get("forward") if hasattr(model, "_original_forward") else None
    try:
        if prepared is not None:  # accelerate's, with mixed precision inside
            model.forward = model._original_forward
        for p in low:
            p.data = p.data.float()
        yield
    finally:
        for p, data in zip(low, saved, strict=True):
            p.data = data
        if prepared is not None:
            model.forward = prepared
