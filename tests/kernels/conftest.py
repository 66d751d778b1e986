"""Where the kernels' tests run, and memory in which nothing may be read before it is written."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """The CPU (plain PyTorch, or Triton's interpreter if the environment asks for it), and a GPU if there is one."""
    return request.param


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Every uninitialised float tensor holds NaN."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
