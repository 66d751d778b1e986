"""Is the head still a random initialisation? The checkpoint tells; without one, the weight's statistics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftscope._text import sig
from driftscope.hooks.doctor.reward_head import base_of
from driftscope.hooks.doctor.reward_peft import initial_weights, own_weights

ERRORS = 4.0
"""Standard errors within which mean and deviation count as those of the initialisation."""


def head_is_random(model: nn.Module, head: str) -> tuple[bool | None, str]:
    """Whether the head was never trained, and how that is known."""
    base = base_of(model)
    module = base.get_submodule(head)
    weights = {name: p.detach() for name, p in own_weights(module)}
    before = initial_weights(module)
    if any(name in before and not torch.equal(before[name].to(w.device), w) for name, w in weights.items()):
        return False, "the copy that PEFT saves differs from the one it began with"
    where, keys = _checkpoint(base)
    if where is not None:
        return _by_checkpoint(where, keys, head, weights)
    weight = max(weights.values(), key=lambda w: w.numel(), default=None)
    return (None, "the head has no weights") if weight is None else _by_statistics(weight, base)


def _by_checkpoint(
    where: str, keys: dict[str, Path], head: str, weights: dict[str, Tensor]
) -> tuple[bool | None, str]:
    from safetensors import safe_open

    for name, weight in weights.items():
        wanted = f"{head}.{name}"
        key = next((k for k in keys if k == wanted or k.endswith(f".{wanted}")), None)
        if key is None:
            return True, f"the checkpoint ({where}) has no {wanted}"
        with safe_open(str(keys[key]), framework="pt") as file:
            shape = tuple(file.get_slice(key).get_shape())
        if shape != tuple(weight.shape):
            return True, f"{wanted} is {shape} in the checkpoint ({where}) and {tuple(weight.shape)} in the model"
    return False, f"the checkpoint ({where}) has its weights"


def _by_statistics(weight: Tensor, base: nn.Module) -> tuple[bool | None, str]:
    """Compare mean and standard deviation with those of an initialisation."""
    values = weight.float()
    count, mean = values.numel(), float(values.mean())
    if count < 2:
        return None, "the head's weight is one number"
    std = float(values.std())
    if std == 0.0:
        return True, f"its weight is {sig(mean)} everywhere"
    config: Any = getattr(base, "config", None)
    spread = getattr(config, "initializer_range", None)
    wide = 1.0 / math.sqrt(3.0 * values.shape[-1])  # nn.Linear's own: uniform in +-1/sqrt(fan_in)
    expected, words = wide, f"nn.Linear's own initialisation {sig(wide)}"
    if isinstance(spread, float) and spread > 0:
        expected, words = spread, f"config.initializer_range {spread}"
    close = abs(std / expected - 1.0) < ERRORS / math.sqrt(2 * count)
    if close and abs(mean) < ERRORS * expected / math.sqrt(count):
        return True, f"{count} weights with mean {sig(mean)} and standard deviation {sig(std)}, as {words} gives"
    return False, f"mean {sig(mean)} and standard deviation {sig(std)} of its weights, not as {words} gives"


def _checkpoint(base: nn.Module) -> tuple[str | None, dict[str, Path]]:
    """Keys of the checkpoint that the model was loaded from -> their files; safetensors, on this machine only."""
    name = str(getattr(base, "name_or_path", "") or getattr(getattr(base, "config", None), "name_or_path", "") or "")
    if not name:
        return None, {}
    index, single = _file(name, "model.safetensors.index.json"), _file(name, "model.safetensors")
    try:
        if index is not None:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            found = {str(key): index.parent / str(file) for key, file in table.items()}
            return ("safetensors index", found) if all(f.is_file() for f in found.values()) else (None, {})
        if single is not None:
            from safetensors import safe_open

            with safe_open(str(single), framework="pt") as file:
                return "model.safetensors", dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, AttributeError):
        return None, {}
    return None, {}


def _file(name: str, file: str) -> Path | None:
    """A file of a checkpoint: of a local directory, or in the hub's cache; nothing is downloaded."""
    if Path(name).is_dir():
        return Path(name, file) if Path(name, file).is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, file)
    except Exception:  # noqa: BLE001 - no such library, or no name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None
