"""The batch of the gradient check: a small synthetic one, or the user's, looked at before the model sees it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.errors import UsageError
from driftscope.hooks.head import causal_lm

TOKENS = 16
"""Length of the synthetic sequence."""


def prepare(model: nn.Module, batch: Mapping[str, Any] | None, *, check: bool = True) -> dict[str, Any]:
    """The batch on the model's device, checked where a misfit can be told in advance; a synthetic one for ``None``.

    check: whether the model itself is called on the batch (a loss of the user's may want other keys).
    Raises UsageError for a batch that cannot fit, or where no synthetic one can be made.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if batch is None:
        made = synthetic(model)
    elif isinstance(batch, Mapping):
        made = dict(batch)
    else:
        raise UsageError(
            f"batch is a {type(batch).__name__}: the model is called with keywords. "
            "Pass a dict such as {'input_ids': ..., 'attention_mask': ...}, or None for a synthetic batch."
        )
    made = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}
    if check:
        _check_keys(model, made)
        _check_ids(model, made)
        if "use_cache" not in made and "use_cache" in _accepted(causal_lm(model).forward)[0]:
            made["use_cache"] = False  # what trainers pass; a cache and checkpointing exclude each other
    return made


def synthetic(model: nn.Module) -> dict[str, Any]:
    """One sequence of ``TOKENS`` different ids (1, T), no padding. Raises UsageError without a vocabulary."""
    config: Any = getattr(causal_lm(model), "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = _vocabulary(model) or getattr(text, "vocab_size", None)
    if not vocab:
        raise UsageError(
            f"batch=None: {type(model).__name__} has no input embeddings and no config.vocab_size, from which a "
            "synthetic batch could be made. Pass a batch, e.g. one of the trainer's data loader."
        )
    special = {getattr(text, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    plain = [i for i in range(min(vocab, 64)) if i not in special] or [0]
    ids = torch.tensor([[plain[(7 * i + 3) % len(plain)] for i in range(TOKENS)]])
    made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = ids.clone()
    names, anything = _accepted(causal_lm(model).forward)
    return {name: value for name, value in made.items() if anything or name in names}


def _accepted(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Names of the parameters, and whether any other keyword is taken too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(), True
    return {p.name for p in parameters}, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _check_keys(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse keys that the model's own forward does not name: those with **kwargs may drop them silently."""
    inner = causal_lm(model)
    names, anything = _accepted(inner.forward)
    known = set(names) | _accepted(model.forward)[0]
    unknown = [name for name in batch if name not in known]
    if unknown and (not anything or "input_ids" in names):
        raise UsageError(
            f"batch has the keys {sorted(batch)}: the forward of {type(inner).__name__} takes no "
            f"{', '.join(map(repr, unknown))}. Pass what the model takes: "
            f"{', '.join(sorted(n for n in names if n not in ('args', 'kwargs', 'self')))}."
        )
    if "input_ids" in names and not {"input_ids", "inputs_embeds"} & set(batch):
        raise UsageError(
            f"batch has the keys {sorted(batch)} and neither input_ids nor inputs_embeds: {type(inner).__name__} has "
            "nothing to run on. Add input_ids, a tensor (B, L) of token ids."
        )


def _vocabulary(model: nn.Module) -> int | None:
    """Number of rows of the input embeddings."""
    try:
        embeddings = causal_lm(model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(embeddings, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) else None


def _check_ids(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Ids outside the vocabulary and masks of another shape: on a GPU the forward's own error ends the process."""
    ids, vocab = batch.get("input_ids"), _vocabulary(model)
    if not isinstance(ids, Tensor):
        return
    if ids.dim() != 2 or ids.is_floating_point():
        raise UsageError(
            f"batch['input_ids'] is {ids.dtype} of shape {tuple(ids.shape)}: the embeddings want whole numbers of "
            "shape (B, L). Pass a LongTensor of token ids with a batch dimension."
        )
    if vocab and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise UsageError(
            f"batch['input_ids'] holds ids from {int(ids.min())} to {int(ids.max())}: the model's vocabulary has "
            f"{vocab} entries, 0 to {vocab - 1}. Tokenize with the model's own tokenizer, or resize its embeddings."
        )
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape:
        raise UsageError(
            f"batch['attention_mask'] has shape {tuple(mask.shape)} and batch['input_ids'] {tuple(ids.shape)}: a mask "
            "says for every id whether it counts. Pass both in one shape (B, L)."
        )
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.shape == ids.shape and vocab:
        kept = labels[labels != -100]
        if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < vocab:
            raise UsageError(
                f"batch['labels'] holds ids from {int(kept.min())} to {int(kept.max())}: the model's vocabulary has "
                f"{vocab} entries. Use token ids, and -100 where no loss is wanted."
            )
