"""Leave the process as it was: what building and running a trainer changes beside the trainer itself."""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from driftscope.hooks.demo import quiet

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set by a launcher of several processes; the probe's trainers are of one process."""


@contextmanager
def untouched() -> Iterator[None]:
    """Inside, trainers may be built and run; afterwards the process is as before.

    Restored: random states (Python, NumPy, torch), environment variables, accelerate's shared state, log levels and
    warning filters, torch's gradient mode and number of threads.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_random_state())
        stack.enter_context(_accelerate())
        stack.enter_context(quiet())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_one_thread())
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


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        os.environ.pop(name)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _random_state() -> Iterator[None]:
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    begun = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if begun else []
    pending = getattr(torch.cuda, "_lazy_seed_tracker", None)  # a seed that waits for CUDA to be initialised
    waiting = copy.copy(vars(pending)) if pending is not None else {}
    calls: list[Any] = getattr(torch.cuda, "_queued_calls", [])
    queued = list(calls)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if array is not None:
            numpy.random.set_state(array)
        if begun:
            torch.cuda.set_rng_state_all(devices)
        elif pending is not None and not torch.cuda.is_initialized():
            vars(pending).update(waiting)
            calls[:] = queued


@contextmanager
def _accelerate() -> Iterator[None]:
    """accelerate keeps one state for the process, which TrainingArguments resets: set it aside and put it back.

    In place: a user's Accelerator holds the very dictionaries.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared: list[dict[str, Any]] = [c._shared_state for c in (AcceleratorState, GradientState, PartialState)]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, kept in zip(shared, before, strict=True):
            state.clear()
            state.update(kept)
