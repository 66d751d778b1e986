"""Full-parameter gradient norms of loss paths over an accumulation window, exactly, by a rerun of the trunk.

For each path: the backbone's forward again with the live call's own arguments and random state, the path's
coefficients pulled back through its head (in token tiles, so that head weights get their gradient without the full
logits), then the hidden gradient through the trunk. The trainer's own gradients are set aside and put back; random
states are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.hooks.capture import BackboneCall, rng_kept
from driftscope.spectrum import FUSED_ROWS, Head, score


@dataclass(frozen=True)
class PullBack:
    """Coefficients of a path on the (B, T) completion positions, and the head they go through."""

    head: Head
    coef_BT: Tensor
    entropy_coef_BT: Tensor | None
    targets_BT: Tensor
    temperature: float
    grad_BTD: Tensor | None = None  # where given, this hidden gradient goes into the trunk instead


@dataclass
class WindowGradient:
    """Gradient of one path, summed over the micro-batches of a window."""

    grads: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    micro_batches: int = 0

    def add(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is not None:
                self.grads[p] = self.grads[p] + p.grad if p in self.grads else p.grad
        self.micro_batches += 1

    def norm(self) -> float:
        """L2 norm over all parameters, accumulated in float64."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self.grads.values()]
        return float(torch.stack([n.cpu() for n in norms]).norm()) if norms else 0.0


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


def add_micro_batch(
    window: WindowGradient,
    backbone: nn.Module,
    parameters: list[nn.Parameter],
    calls: list[BackboneCall],
    path: PullBack,
    *,
    rows: int,
    autocast: Any,
    device: torch.device,
) -> None:
    """Add one micro-batch of a path to its window. ``rows``: tokens of a logits tile."""
    with rng_kept(device), gradients_set_aside(parameters), torch.enable_grad():
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
        grad_BTD = _through_head(hidden_BLD.detach()[:, -length - 1 : -1], path, rows)
        if path.grad_BTD is not None:
            grad_BTD = path.grad_BTD.to(grad_BTD.dtype)
        full = torch.zeros_like(hidden_BLD)
        full[:, -length - 1 : -1] = grad_BTD
        hidden_BLD.backward(full)
        window.add(parameters)


def _through_head(hidden_BTD: Tensor, path: PullBack, rows: int) -> Tensor:
    """Pull the coefficients back through the head; head parameters collect their gradient in ``.grad``."""
    leaf = hidden_BTD.clone().requires_grad_(True)
    active = path.coef_BT != 0
    if path.entropy_coef_BT is not None:
        active = active | (path.entropy_coef_BT != 0)
    targets, coefs = path.targets_BT[active], path.coef_BT[active]
    bonus = path.entropy_coef_BT[active] if path.entropy_coef_BT is not None else None
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
