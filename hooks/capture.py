"""Capture: the real batch, hidden states and hidden gradient of the live backward, by hooks that change nothing.

The backbone's output is read in a forward hook and its gradient in a tensor hook; neither returns a value, so the
graph and the numbers of the run stay as they are. Outputs of layers under gradient checkpointing are not touched: the
backbone's own output is outside of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from driftscope.ranks.share import Local
from driftscope.records import Tier


@dataclass
class BackboneCall:
    """One forward of the backbone under the loss: its arguments where a rerun needs them, output and gradient."""

    hidden_BLD: Tensor | None = None
    grad_BLD: Tensor | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rng: RngState | None = None


@dataclass
class MicroBatch:
    """What was captured of one micro-batch of the live run."""

    tier: Tier
    inputs: Mapping[str, Any] | None = None
    loss: Tensor | None = None
    entropy_coef: float = 0.0
    rank_mean_tokens: tuple[float, float] | None = None  # as in TokenBatch; with several processes
    local: Local = field(default_factory=Local)
    calls: list[BackboneCall] = field(default_factory=list)
    forward_spans: list[tuple[Any, Any]] = field(default_factory=list)  # begin and end: CUDA events, or host seconds

    def completion(self) -> tuple[Tensor, Tensor] | None:
        """Hidden states and hidden gradient (B, T, D) at the positions that predict the completion, if captured."""
        used = [c for c in self.calls if c.hidden_BLD is not None and c.grad_BLD is not None]
        if not used or self.inputs is None:
            return None
        length = self.inputs["completion_ids"].size(1)
        hidden = torch.cat([c.hidden_BLD for c in used if c.hidden_BLD is not None])
        grad = torch.cat([c.grad_BLD for c in used if c.grad_BLD is not None])
        if hidden.shape[0] != self.inputs["completion_ids"].shape[0]:
            return None
        return hidden[:, -length - 1 : -1], grad[:, -length - 1 : -1]


@dataclass
class RngState:
    """State of torch's generators on the CPU and on one device."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None = None

    @classmethod
    def read(cls, device: torch.device) -> RngState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@contextmanager
def rng_kept(device: torch.device) -> Iterator[None]:
    """Leave torch's generators as they were."""
    before = RngState.read(device)
    try:
        yield
    finally:
        before.restore()


class Capture:
    """Hooks on a backbone. ``current`` is the micro-batch being captured.

    Where it is ``None``, or of the light tier, the hooks do nothing.
    """

    def __init__(
        self,
        backbone: nn.Module,
        device: torch.device,
        *,
        timed: bool = False,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """timed: also note when the backbone's forward begins and ends, on every tier. failed: is told an error."""
        self.current: MicroBatch | None = None
        self._failed = failed
        self._device, self._timed = device, timed
        self._forward: Any = None
        self._handles: list[RemovableHandle] = [
            backbone.register_forward_pre_hook(partial(self._safely, self._before), with_kwargs=True),
            backbone.register_forward_hook(partial(self._safely, self._after)),
        ]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model, or the model in a file, takes neither the batch nor the trainer with it."""
        return {**self.__dict__, "current": None, "_failed": None}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _safely(self, part: Callable[..., None], *args: Any) -> None:
        """Run a hook inside the run's own forward or backward: what fails there ends the capture, not the run."""
        try:
            part(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self.current = None
            if self._failed is not None:
                self._failed(error)

    def _now(self) -> Any:
        """This moment: on the GPU's stream, or on the host."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = self.current
        if batch is not None and self._timed and torch.is_grad_enabled():
            self._forward = self._now()
        if batch is None or batch.tier == "light" or batch.inputs is None or not torch.is_grad_enabled():
            return
        call = BackboneCall()
        if batch.tier == "deep":
            call.args, call.kwargs, call.rng = args, dict(kwargs), RngState.read(self._device)
        batch.calls.append(call)

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        batch = self.current
        if batch is not None and self._forward is not None:
            batch.forward_spans.append((self._forward, self._now()))
            self._forward = None
        if batch is None or not batch.calls or not torch.is_grad_enabled():
            return
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            hidden = output[0] if isinstance(output, tuple) else output
        call = batch.calls[-1]
        if not isinstance(hidden, Tensor) or not hidden.requires_grad:
            return
        call.hidden_BLD = hidden.detach()

        def keep(grad: Tensor) -> None:
            call.grad_BLD = grad.detach().clone()

        hidden.register_hook(partial(self._safely, keep))
