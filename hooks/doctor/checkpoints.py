"""Gradient checkpointing as it happens: which variant runs, and what it would be like with another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

Variant = Literal["as it is", "non-reentrant", "off"]


@dataclass
class Block:
    """One call of reentrant checkpointing."""

    inputs_need: bool
    """Whether one of its positional inputs requires a gradient; without one it is never recomputed."""
    first: Any = None
    """The first module call inside."""


@dataclass
class Checkpoints:
    """What was seen of checkpointing during a forward."""

    reentrant: int = 0
    non_reentrant: int = 0
    open: list[Block] = field(default_factory=list)


@contextmanager
def watched(variant: Variant = "as it is") -> Iterator[Checkpoints]:
    """Watch torch's checkpointing, whoever calls it; with a ``variant``, reentrant blocks run in that one.

    The names are put over ``torch.utils.checkpoint``'s own for as long as the block lasts.
    """
    seen = Checkpoints()
    original: Any = torch_checkpoint.CheckpointFunction
    generator: Any = getattr(torch_checkpoint, "_checkpoint_without_reentrant_generator", None)

    class Watcher:
        """Stands for ``CheckpointFunction``; only ``apply`` is asked."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if variant == "off":
                return function(*args)
            if variant == "non-reentrant":
                return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
            seen.reentrant += 1
            seen.open.append(Block(any(isinstance(a, Tensor) and a.requires_grad for a in args)))
            try:
                return original.apply(function, preserve, *args)
            finally:
                seen.open.pop()

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.non_reentrant += 1
        return generator(*args, **kwargs)

    torch_checkpoint.CheckpointFunction = Watcher  # type: ignore[assignment,misc]
    if generator is not None:
        torch_checkpoint._checkpoint_without_reentrant_generator = counted
    try:
        yield seen
    finally:
        torch_checkpoint.CheckpointFunction = original  # type: ignore[misc]
        if generator is not None:
            torch_checkpoint._checkpoint_without_reentrant_generator = generator
