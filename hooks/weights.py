"""An earlier state of the trained weights, kept on the host, and put in place for the length of a forward."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_INDEXED = re.compile(r"^(.*?\.\d+)(?:\.|$)")


class Snapshot:
    """Copies of a model's trainable parameters on the host, by name.

    Tied parameters are kept once, under their first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies = {n: _host_like(p) for n, p in trainable(model)}
        self.take()

    def take(self) -> None:
        """Keep the values of now, in the memory that is there."""
        with torch.no_grad():
            for name, parameter in trainable(self._model):
                self._copies[name].copy_(parameter, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are kept."""
        return tuple(self._copies)

    @contextmanager
    def in_place(self, names: Iterable[str] | None = None) -> Iterator[None]:
        """The kept values in the model (only those of ``names``), the present ones again afterwards, bit for bit.

        The present values wait on the host meanwhile.
        """
        wanted = set(self._copies if names is None else names)
        swapped: list[tuple[Tensor, Tensor]] = []
        parameters = dict(trainable(self._model))
        try:
            with torch.no_grad():
                for name in wanted:
                    parameter, copy = parameters[name], self._copies[name]
                    present = parameter.detach().to("cpu", copy=True)
                    swapped.append((parameter, present))
                    parameter.copy_(copy)
            yield
        finally:
            with torch.no_grad():
                for kept, present in swapped:
                    kept.copy_(present)


def _host_like(parameter: Tensor) -> Tensor:
    """Host memory for a parameter; pinned where it comes from a GPU, so that copies are fast."""
    return torch.empty_like(parameter, device="cpu", pin_memory=parameter.device.type == "cuda")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters with their names."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def size_bytes(model: nn.Module) -> int:
    """Bytes that a snapshot of the model takes."""
    return sum(p.numel() * p.element_size() for _, p in trainable(model))


def blocks(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by block: up to the first numbered part of their name (a layer), else their module."""
    out: dict[str, list[str]] = {}
    for name in names:
        numbered = _INDEXED.match(name)
        out.setdefault(numbered.group(1) if numbered else name.rpartition(".")[0], []).append(name)
    return out


def modules(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by the module that holds them."""
    out: dict[str, list[str]] = {}
    for name in names:
        out.setdefault(name.rpartition(".")[0], []).append(name)
    return out
