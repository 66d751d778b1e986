"""Keep what the doctor builds and runs from leaving traces in the process.

Constructing TRL's configurations and trainers resets accelerate's process-wide state, writes environment variables and
seeds every generator; a user's own trainer may be alive in the same process.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from driftscope.hooks.demo import quiet
from driftscope.hooks.sampler import RENDEZVOUS

LAUNCHER = (*RENDEZVOUS, "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Set by a launcher of several processes; what is built inside is of one process."""


@contextmanager
def isolated(*, keep_accelerate: bool = True) -> Iterator[None]:
    """Environment, accelerate's state and random states are afterwards as they were; the stack's noise is kept away.

    keep_accelerate: whether accelerate's state stays visible inside. ``False`` gives what is built inside a state of
    its own. In place: a user's Accelerator holds the very dictionaries.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = [cls._shared_state for cls in (PartialState, AcceleratorState, GradientState)]
    saved = [dict(state) for state in states]
    environment = dict(os.environ)
    with random_state(), quiet(), _no_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream attributes some of its warnings to the caller
        if not keep_accelerate:
            for name in [name for name in os.environ if name.startswith("ACCELERATE_") or name in LAUNCHER]:
                del os.environ[name]
            for state in states:
                state.clear()
        try:
            yield
        finally:
            for state, before in zip(states, saved, strict=True):
                state.clear()
                state.update(before)
            _restore_environment(environment)


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bars of the datasets library inside."""
    from datasets.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _restore_environment(before: dict[str, str]) -> None:
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextmanager
def random_state() -> Iterator[None]:
    """The random states of Python, NumPy and torch (CPU and CUDA devices) are afterwards as they were.

    Where CUDA is not initialised, a seed that waits for it is put back too.
    """
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    begun = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if begun else []
    pending = getattr(torch.cuda, "_lazy_seed_tracker", None)
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
def as_it_was(*models: nn.Module | None) -> Iterator[None]:
    """Evaluation mode inside; each module's mode and each parameter's ``requires_grad`` are as they were afterwards.

    Values, gradients and buffers are not looked after.
    """
    modules = [module for model in models if model is not None for module in model.modules()]
    parameters = [p for model in models if model is not None for p in model.parameters()]
    modes = [module.training for module in modules]
    grads = [p.requires_grad for p in parameters]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for p, wanted in zip(parameters, grads, strict=True):
            if p.requires_grad != wanted:
                p.requires_grad_(wanted)
