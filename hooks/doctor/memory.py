"""What a forward keeps in memory for its backward, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class SavedBytes:
    """Storages that autograd holds, each counted once; those of the model itself are there anyway and do not count."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._own = {t.untyped_storage().data_ptr() for t in tensors}
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves. It stays alive in the graph, so its address is not used again."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # without its graph: a saved output would hold itself

    @property
    def bytes(self) -> int:
        """Bytes held so far."""
        return sum(self._sizes.values())


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Counts what the forward inside saves for a backward, by ``torch.autograd.graph.saved_tensors_hooks``.

    Non-reentrant checkpointing keeps its own hooks inside a block, so that only the block's inputs count, which is
    what it holds. Measure while the loss is alive, and do not run the backward on it: the hooks switch autograd's
    check of in-place changes off.
    """
    counter = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor):
        yield counter
