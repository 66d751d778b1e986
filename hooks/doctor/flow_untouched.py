"""The promise of the gradient check: whatever it does to a model, the model is as it was afterwards, bit for bit."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put everything that the block changes back: parameters' ``.grad`` (the same tensors) and ``requires_grad``,
    buffers, modes, hooks, attributes of modules and of their configs, and the random state.

    Inside, every ``.grad`` is ``None``, and post-accumulate-grad hooks (an optimizer in the backward) are off.
    """
    undo = [_random_state(model), *(_attributes(m) for m in model.modules()), *_configs(model)]
    undo += [_buffer(b) for b in model.buffers()]
    undo += [_parameter(p) for p in model.parameters()]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def attributes_kept(*owners: Any) -> Callable[[], None]:
    """Remembers the attributes of modules (those inside them too) or configurations; what it returns restores them."""
    each = [part for owner in owners for part in (owner.modules() if isinstance(owner, nn.Module) else (owner,))]
    undo = [_attributes(part) for part in each]

    def restore() -> None:
        for one in reversed(undo):
            one()

    return restore


def _attributes(owner: Any) -> Callable[[], None]:
    """Restores an object's attributes; containers among them in place, since hook handles refer to them."""
    before = dict(owner.__dict__)
    contents = {name: (value, value.copy()) for name, value in before.items() if type(value) in _CONTAINERS}

    def restore() -> None:
        now = owner.__dict__
        for name in [name for name in now if name not in before]:
            del now[name]
        for name, value in before.items():
            if name not in now or now[name] is not value:
                now[name] = value
        for value, content in contents.values():
            _refill(value, content)

    return restore


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, in place, if it has another one now."""
    if isinstance(container, list):
        if list(map(id, container)) != list(map(id, content)):
            container[:] = content
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif [(k, id(v)) for k, v in container.items()] != [(k, id(v)) for k, v in content.items()]:
        container.clear()
        container.update(content)


def _configs(model: nn.Module) -> list[Callable[[], None]]:
    """Restorers of the configurations that the modules share."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for name in ("config", "generation_config"):
            config = module.__dict__.get(name)
            for each in (config, *vars(config).values()) if hasattr(config, "__dict__") else ():
                if hasattr(each, "to_dict") and hasattr(each, "__dict__"):
                    found[id(each)] = each
    return [_attributes(config) for config in found.values()]


def _buffer(buffer: torch.Tensor) -> Callable[[], None]:
    before = buffer.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            if not torch.equal(buffer, before):
                buffer.copy_(before)

    return restore


def _parameter(parameter: nn.Parameter) -> Callable[[], None]:
    gradient, trains = parameter.grad, parameter.requires_grad
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    kept = dict(hooks) if hooks else {}
    parameter.grad = None
    if kept:
        hooks.clear()

    def restore() -> None:
        parameter.requires_grad_(trains)
        parameter.grad = gradient
        if kept:
            hooks.clear()
            hooks.update(kept)

    return restore


def _random_state(model: nn.Module) -> Callable[[], None]:
    """Restores the generators of Python, NumPy, torch's CPU and the devices that the model is on."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    states = {device: torch.get_device_module(device.type).get_rng_state(device) for device in devices}

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if legacy is not None:
            numpy.random.set_state(legacy)
        for device, state in states.items():
            torch.get_device_module(device.type).set_rng_state(state, device)

    return restore
