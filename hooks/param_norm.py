"""Full-parameter gradients of loss paths, by a rerun of the trunk, handed on parameter by parameter.

For each path: the backbone's forward again with the live call's own arguments and random state, the path's
coefficients pulled back through its head (in token tiles, so that head weights get their gradient without the full
logits), then the hidden gradient through the trunk. As soon as a parameter's gradient is complete it is given to a
sink and freed, so no second full gradient is held. The trainer's own gradients are set aside and put back; random
states are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.hooks.capture import BackboneCall, rng_kept
from driftscope.spectrum import FUSED_ROWS, Head, score

Sink = Callable[[nn.Parameter, Tensor], None]
"""Takes a parameter's gradient, or a part of it: parts of one micro-batch add up."""


@dataclass(frozen=True)
class PullBack:
    """Coefficients of a path on the (B, T) completion positions, and the head they go through."""

    head: Head
    coef_BT: Tensor
    entropy_coef_BT: Tensor | None
    targets_BT: Tensor
    temperature: float
    grad_BTD: Tensor | None = None  # where given, this hidden gradient goes into the trunk instead


@contextmanager
def gradients_set_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Empty ``.grad`` inside, the very same tensors afterwards."""
    kept = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


@contextmanager
def gradients_streamed(parameters: list[nn.Parameter], sink: Sink) -> Iterator[None]:
    """Inside, each gradient goes to the sink once it is accumulated, and ``.grad`` stays empty.

    The hooks are torch's own, on the parameters alone; none is left afterwards.
    """

    def hand_on(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            sink(parameter, grad)  # type: ignore[arg-type]

    handles = [p.register_post_accumulate_grad_hook(hand_on) for p in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def add_micro_batch(
    sink: Sink,
    backbone: nn.Module,
    parameters: list[nn.Parameter],
    calls: list[BackboneCall],
    path: PullBack,
    *,
    rows: int,
    autocast: Any,
    device: torch.device,
    scale: float = 1.0,
) -> None:
    """Hand the gradient of one micro-batch of a path to the sink.

    rows: tokens of a logits tile. scale: a gradient scaler's factor, which the backward runs with and which the sink's
    gradients still have, so that small values survive in fp16 as they do in the live backward.
    """
    with rng_kept(device), gradients_set_aside(parameters), gradients_streamed(parameters, sink), torch.enable_grad():
        hidden = []
        for call in calls:
            if call.rng is None:
                raise RuntimeError("the backbone's arguments were not captured, so it cannot be run again")
            call.rng.restore()
            with autocast():
                out = backbone(*call.args, **call.kwargs)
            hidden.append(out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0])
        hidden_BLD = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
        length = path.targets_BT.shape[1]
        grad_BTD = _through_head(hidden_BLD.detach()[:, -length - 1 : -1], path, rows, scale)
        if not hidden_BLD.requires_grad:
            return  # nothing below the head is trained
        if path.grad_BTD is not None:
            grad_BTD = (path.grad_BTD * scale).to(grad_BTD.dtype)
        full = torch.zeros_like(hidden_BLD)
        full[:, -length - 1 : -1] = grad_BTD
        hidden_BLD.backward(full)


def _through_head(hidden_BTD: Tensor, path: PullBack, rows: int, scale: float) -> Tensor:
    """Pull the coefficients back through the head; gradients of its parameters go out tile by tile."""
    leaf = hidden_BTD.clone().requires_grad_(True)
    active = path.coef_BT != 0
    if path.entropy_coef_BT is not None:
        active = active | (path.entropy_coef_BT != 0)
    targets, coefs = path.targets_BT[active], path.coef_BT[active] * scale
    bonus = path.entropy_coef_BT[active] * scale if path.entropy_coef_BT is not None else None
    where = active.nonzero()
    rows = FUSED_ROWS if path.head.fused is not None else rows
    for start in range(0, where.shape[0], rows):
        at = where[start : start + rows]
        part = slice(start, start + rows)
        logps, entropies = score(path.head, leaf[at[:, 0], at[:, 1]], targets[part], path.temperature)
        total = (logps * coefs[part].to(logps.dtype)).sum()
        if bonus is not None:
            total = total + (entropies * bonus[part].to(entropies.dtype)).sum()
        total.backward()
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
