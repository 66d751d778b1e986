"""One real forward and backward of a model, and what it left in the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.doctor.facts import Checkpointing
from driftscope.errors import DriftscopeError, UsageError
from driftscope.hooks.doctor.calls import Calls, floating, recorded
from driftscope.hooks.doctor.checkpoints import Checkpoints, Variant, watched
from driftscope.hooks.doctor.memory import saved_bytes

Loss = Callable[[nn.Module, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Backward:
    """What one backward did."""

    missing: tuple[str, ...]
    """Trainable parameters without a gradient."""
    zero: tuple[str, ...]
    """Trainable parameters whose gradient is exactly zero."""
    error: str | None
    checkpointing: Checkpointing
    calls: Calls


def backward(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None, variant: Variant = "as it is") -> Backward:
    """Forward and backward in train mode, leaving gradients behind: only inside ``untouched``.

    Raises UsageError where the forward does not take the batch.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.grad = None
    error = None
    with quiet(), watched(variant) as seen, recorded(model, seen) as calls:
        value = scalar(model, batch, loss)
        calls.backward = True
        try:
            value.backward()  # type: ignore[no-untyped-call,unused-ignore]
        except torch.OutOfMemoryError as raised:
            raise _too_large("backward", raised) from raised
        except Exception as raised:  # noqa: BLE001 - what it is, is the finding
            error = str(raised) or type(raised).__name__
    with_gradient = {name for name, p in trainable.items() if p.grad is not None and error is None}
    zero = tuple(n for n in trainable if n in with_gradient and not bool(torch.any(_values(trainable[n].grad))))
    missing = tuple(name for name in trainable if name not in with_gradient)
    return Backward(missing, zero, error, _kind(seen), calls)


def held_bytes(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None, variant: Variant = "as it is") -> int:
    """Bytes of tensors that the forward keeps for the backward."""
    with quiet(), watched(variant), saved_bytes(model) as counter:
        value = scalar(model, batch, loss)
        held = counter.bytes
        del value
    return held


@contextmanager
def quiet() -> Iterator[None]:
    """Train as a trainer would, whatever the caller's grad mode is; warnings are for the caller's own runs."""
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def scalar(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None) -> Tensor:
    """The loss of the batch: the callable's, else ``outputs.loss``, else an uneven sum of the outputs.

    Raises UsageError where the model or the callable does not take the batch.
    """
    model.train()
    shapes = ", ".join(f"{name} {_shape(value)}" for name, value in batch.items())
    what = "loss(model, batch)" if loss is not None else type(model).__name__
    try:
        made = loss(model, dict(batch)) if loss is not None else _of_outputs(model(**batch))
    except torch.OutOfMemoryError as error:
        raise _too_large("forward", error) from error
    except DriftscopeError:
        raise
    except Exception as error:
        raise UsageError(
            f"batch ({shapes}) does not fit the model: {what} raised {type(error).__name__}: {error}. Pass a batch "
            "as the trainer's data loader makes it, or None for a synthetic one."
        ) from error
    value: object = made
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(
            f"{what} gave {_shape(value)}: a backward begins at a single number. "
            "Let it return a scalar tensor, e.g. by .mean()."
        )
    return value


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _of_outputs(outputs: Any) -> Tensor:
    """``outputs.loss``, or a sum of the outputs with uneven weights, so that no gradient cancels by symmetry."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(outputs, name, None), Tensor):
            outputs = getattr(outputs, name)
            break
    parts = [_uneven_sum(tensor) for tensor in floating(outputs) if tensor.numel()]
    if not parts:
        raise UsageError(
            f"The model returned {type(outputs).__name__} without a floating tensor: there is nothing to make a loss "
            "of. Pass loss=, a callable (model, batch) -> scalar tensor."
        )
    return torch.stack(parts).sum()


def _uneven_sum(tensor: Tensor) -> Tensor:
    """Scaled by the root of the size: a plain mean over a large vocabulary underflows in half precision."""
    weights = torch.cos(torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32) * 0.7 + 0.3)
    made: Tensor = (tensor.float().reshape(-1) * weights).sum() / tensor.numel() ** 0.5
    return made


def _values(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _kind(seen: Checkpoints) -> Checkpointing:
    if seen.reentrant:
        return "reentrant"
    return "non-reentrant" if seen.non_reentrant else "none"


def _too_large(where: str, error: Exception) -> UsageError:
    return UsageError(
        f"batch: the {where} ran out of memory ({str(error).splitlines()[0]}). The gradient check needs one "
        "micro-batch; pass a smaller one, or None for a single short sequence."
    )
