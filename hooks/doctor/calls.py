"""A record of the module calls of one forward and backward: where a graph is built, and where a gradient arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.hooks.doctor.checkpoints import Block, Checkpoints

_WRAPPED = "._checkpoint_wrapped_module"


@dataclass(eq=False)
class Call:
    """One call of one module."""

    name: str
    begin: int
    parent: Call | None
    scope: Call | None
    """The outermost call of the recomputation that this one belongs to; ``None`` in the forward."""
    grad: bool
    """Whether autograd recorded."""
    needs: bool
    """Whether an input requires a gradient."""
    shapes: frozenset[tuple[int, ...]]
    block: Block | None = None
    """The reentrant checkpoint that it runs in."""
    end: int | None = None
    gives: bool | None = None
    """Whether an output requires a gradient; ``None`` where there is no floating output."""
    same_shape: bool = False
    arrived: bool = False
    """Whether a gradient arrived at an output."""
    arrived_in: bool = False
    """Whether a gradient arrived at an input."""

    def within(self, other: Call) -> bool:
        """Whether the other call contains this one."""
        above = self.parent
        while above is not None:
            if above is other:
                return True
            above = above.parent
        return False


@dataclass
class Calls:
    """Every call, in the order in which they ended."""

    ended: list[Call] = field(default_factory=list)
    begun: dict[str, list[Call]] = field(default_factory=dict)
    backward: bool = False
    """Set by the caller when the backward begins."""


def clean(name: str) -> str:
    """A module's name without what checkpoint wrappers put into it."""
    return name.replace(_WRAPPED, "").removeprefix(_WRAPPED[1:] + ".")


@contextmanager
def recorded(model: nn.Module, seen: Checkpoints) -> Iterator[Calls]:
    """Record every call of the model's modules inside, by hooks that only look."""
    recorder = _Recorder(seen)
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(partial(recorder.enter, name), prepend=True, with_kwargs=True),
            module.register_forward_hook(partial(recorder.leave, name), always_call=True),
        ]
    try:
        yield recorder.calls
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """The hooks: what they see, and which calls are open."""

    def __init__(self, seen: Checkpoints) -> None:
        self.calls = Calls()
        self._seen = seen
        self._open: list[Call] = []
        self._clock = count()

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        inputs = floating((args, kwargs))
        parent = self._open[-1] if self._open else None
        call = Call(
            name=name,
            begin=next(self._clock),
            parent=parent,
            scope=None,
            grad=torch.is_grad_enabled(),
            needs=any(t.requires_grad for t in inputs),
            shapes=frozenset(tuple(t.shape) for t in inputs),
        )
        if self.calls.backward:
            call.scope = parent.scope if parent is not None else call
        elif self._seen.open:
            call.block = self._seen.open[-1]
            if call.block.first is None:
                call.block.first = call
        _when_reached(inputs, call, "arrived_in")
        self.calls.begun.setdefault(name, []).append(call)
        self._open.append(call)

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward has ended."""
        while self._open and self._open[-1].name != name:
            self._open.pop()  # a call that an exception ended
        if not self._open:
            return
        call = self._open.pop()
        outputs = floating(output)
        call.end = next(self._clock)
        call.gives = any(t.requires_grad for t in outputs) if outputs else None
        call.same_shape = any(tuple(t.shape) in call.shapes for t in outputs)
        _when_reached(outputs, call, "arrived")
        self.calls.ended.append(call)


def _when_reached(tensors: list[Tensor], call: Call, what: str) -> None:
    """Set a mark on the call when a gradient arrives at one of the tensors."""
    for tensor in tensors if call.grad else ():
        if tensor.requires_grad:
            tensor.register_hook(lambda _: setattr(call, what, True))


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in nested arguments or outputs."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for each in value.values() for t in floating(each)]
    if isinstance(value, list | tuple):
        return [t for each in value for t in floating(each)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in floating(getattr(value, name, None))]
    return []
