"""What the stack probe's trainers run in: the process stays as it was, and tiny tensors get one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from driftscope.hooks.doctor.isolation import isolated


@contextmanager
def untouched() -> Iterator[None]:
    """Inside, trainers may be built and run; afterwards the process is as before.

    Restored: what ``isolated`` restores, torch's gradient mode and its number of threads.
    """
    with isolated(keep_accelerate=False), torch.enable_grad(), _one_thread():
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads, much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
