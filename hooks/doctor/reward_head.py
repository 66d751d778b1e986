"""Where the reward comes from: the head of a sequence classification model, found on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.hooks.capture import rng_kept

LENGTH = 4
"""Tokens of the sequence that the head is looked for with; more than one, so that a token's logits are told apart."""


def find_head(model: nn.Module) -> str | None:
    """Name of the module that maps hidden states to one row of logits per sequence, as ``modules_to_save`` takes it.

    Found by running the model on one short sequence: the last module outside the backbone whose output the logits
    depend on. A PEFT model's name is the one in its base model. ``None`` for a model without such a head: a causal
    language model (logits per token) or a base model (no logits). The model stays as it is.
    """
    found = head_modules(model)
    return found[-1] if found else None


def head_modules(model: nn.Module) -> tuple[str, ...]:
    """All modules between the backbone and the logits that have weights, in the order of the forward; head last.

    They are what a checkpoint of a causal language model does not hold. Empty where there is no head.
    """
    base = base_of(model)
    with _quiet(base):
        logits = sequence_logits(base)
        if logits is None:
            return ()
        node, prefix = base, ""
        while True:
            inner = _child_with_embedding(node)
            found = _deciding(base, node, prefix, inner, logits)
            if found:
                bare = inner is None or isinstance(getattr(node, inner), nn.Embedding)
                return tuple(found[-1:] if bare else found)  # without a backbone, layers and norms stand beside it
            if inner is None:
                return ()
            node, prefix = getattr(node, inner), f"{prefix}{inner}."


def base_of(model: nn.Module) -> nn.Module:
    """The model under PEFT's wrappers (its adapters are in it), or the model."""
    unwrap = getattr(model, "get_base_model", None)
    base = unwrap() if callable(unwrap) else model
    return base if isinstance(base, nn.Module) else model


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The module that turns token ids into hidden states, or ``None``."""
    read = getattr(model, "get_input_embeddings", None)
    try:
        found = read() if callable(read) else None
    except (AttributeError, NotImplementedError):
        found = None
    if isinstance(found, nn.Module):
        return found
    return next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its input."""
    embedding = embedding_of(model)
    weight = next((embedding if embedding is not None else model).parameters(), None)
    return weight.device if weight is not None else torch.device("cpu")


def sequence_logits(model: nn.Module) -> Tensor | None:
    """Logits (1, n) of one short sequence, or ``None`` where the model has none or has them per token."""
    ids = torch.arange(1, LENGTH + 1, device=device_of(model))[None]  # one row: needs no pad token
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() > 2 or logits.shape[0] != 1:
        return None
    return logits.reshape(1, -1).float()


def _child_with_embedding(node: nn.Module) -> str | None:
    """The child of a module that holds the token embedding."""
    embedding = embedding_of(node)
    if embedding is None:
        return None
    return next((name for name, child in node.named_children() if any(m is embedding for m in child.modules())), None)


def _deciding(base: nn.Module, node: nn.Module, prefix: str, inner: str | None, logits: Tensor) -> list[str]:
    """Children with weights, the one with the embedding apart, whose output changes the logits; as they ran."""
    children = {f"{prefix}{name}": child for name, child in node.named_children() if name != inner}
    ran: list[str] = []
    with _hooked({name: (lambda _m, _i, _o, name=name: ran.append(name)) for name in children}, children):
        sequence_logits(base)
    kept = []
    for name in dict.fromkeys(ran):
        if next(children[name].parameters(), None) is None:
            continue
        with _hooked({name: _disturbed}, children):
            moved = sequence_logits(base)
        if moved is not None and not torch.equal(moved, logits):
            kept.append(name)
    return kept


def _disturbed(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """A forward hook: the output, moved."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return output * 1.5 + 1.0
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return (_disturbed(_module, _inputs, output[0]), *output[1:])
    return output


@contextmanager
def _hooked(hooks: dict[str, Callable[..., Any]], modules: dict[str, nn.Module]) -> Iterator[None]:
    handles = [modules[name].register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, the random state kept; the modules' modes as they were afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), rng_kept(device_of(model)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
