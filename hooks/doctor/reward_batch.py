"""One batch of pairs, chosen above rejected: the trainer's own, or a synthetic one; and the pairwise loss on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from driftscope.errors import UsageError
from driftscope.hooks.doctor.reward_head import base_of, device_of, embedding_of

Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]
MOST_PAIRS = 8
"""Pairs taken from a dataset, if the trainer's batch is not smaller."""
LENGTHS = (6, 9, 12, 7, 5, 10)
"""Tokens of the synthetic sequences: three pairs, of uneven lengths."""


def trainer_batch(trainer: Any) -> dict[str, Any]:
    """The first rows of the training set, through the trainer's own collator, on its device."""
    size = max(1, min(int(trainer.args.per_device_train_batch_size), MOST_PAIRS))
    dataset = trainer.train_dataset
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        rows = [dataset[i] for i in range(min(size, len(dataset)))]
    else:
        rows = list(itertools.islice(iter(dataset), size))
    if not rows:
        raise UsageError("train_dataset is empty: there is no pair to try the loss on.")
    trainer._set_signature_columns_if_needed()
    wanted = trainer._signature_columns if trainer.args.remove_unused_columns else None
    rows = [{k: v for k, v in row.items() if wanted is None or k in wanted} for row in rows]
    return dict(trainer._prepare_inputs(trainer.data_collator(rows)))


def synthetic_batch(model: nn.Module) -> dict[str, Any]:
    """Random ids (6, 12), padded on the right with the model's pad token, the same for every call."""
    vocab, pad = vocabulary(model), pad_token_id(model)
    if vocab is None:
        raise UsageError(f"{type(model).__name__} has no token embedding: give a batch with input_ids.")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (len(LENGTHS), max(LENGTHS)), generator=generator)
    if pad is not None:
        ids[ids == pad] = (pad + 1) % vocab
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids[~mask] = pad if pad is not None else 0
    device = device_of(model)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def checked(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A batch that was given, on the model's device. Raises UsageError where it is no batch of pairs."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] % 2 or not ids.shape[0]:
        got = f"of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else "missing"
        raise UsageError(
            f"batch: input_ids is {got}; the pairwise loss takes ids (2B, T), the B chosen sequences above the B "
            "rejected ones, as trl's DataCollatorForPreference makes them."
        )
    made = {"attention_mask": torch.ones_like(ids), **batch}
    if made["attention_mask"].shape != ids.shape:
        raise UsageError(
            f"batch: attention_mask is {tuple(made['attention_mask'].shape)} and input_ids {tuple(ids.shape)}; "
            "both are (2B, T)."
        )
    device = device_of(model)
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in made.items()}


def pairwise_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The Bradley-Terry loss -log sigmoid(r_chosen - r_rejected), mean over the pairs, as RewardTrainer has it.

    Sequences are run one by one where the model has no pad token: transformers refuses a batch then.
    """
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    if pad_token_id(model) is None:
        logits = torch.cat([alone(model, inputs, row) for row in range(inputs["input_ids"].shape[0])])
    else:
        logits = model(**inputs).logits
    chosen, rejected = torch.chunk(logits.squeeze(-1), chunks=2)
    return -logsigmoid(chosen - rejected).mean()


def trainer_loss(trainer: Any) -> Loss:
    """The trainer's own loss; it gets a copy of the batch, since TRL writes into it."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        made: Tensor = trainer.compute_loss(model, dict(batch))
        return made

    return loss


def alone(model: nn.Module, batch: Mapping[str, Any], row: int) -> Tensor:
    """The logits of one sequence of a batch, without padding, in a batch of its own."""
    kept = batch["attention_mask"][row].bool()
    ids = batch["input_ids"][row][kept][None]
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits


def vocabulary(model: nn.Module) -> int | None:
    """Number of rows of the token embedding."""
    weight = getattr(embedding_of(base_of(model)), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) else None


def pad_token_id(model: nn.Module) -> int | None:
    """The pad token that the model's configuration names."""
    config: Any = getattr(base_of(model), "config", None)
    found = getattr(config, "pad_token_id", None)
    if found is None and hasattr(config, "get_text_config"):
        found = getattr(config.get_text_config(), "pad_token_id", None)
    return found


def outside_vocabulary(batch: Mapping[str, Any], model: nn.Module) -> int | None:
    """An id that the token embedding has no row for. On a GPU such a forward would end the process."""
    vocab, ids = vocabulary(model), batch["input_ids"]
    highest = int(ids.max())
    return highest if vocab is not None and highest >= vocab else None


@contextmanager
def metrics_kept(trainer: Any) -> Iterator[None]:
    """The trainer's metrics and counters are afterwards as they were."""
    if trainer is None:
        yield
        return
    before = dict(vars(trainer))
    if "_metrics" in before:
        trainer._metrics = deepcopy(before["_metrics"])
    try:
        yield
    finally:
        for name in set(vars(trainer)) - set(before):
            delattr(trainer, name)
        for name, value in before.items():
            if vars(trainer).get(name) is not value:
                vars(trainer)[name] = value
