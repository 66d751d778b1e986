"""The head under PEFT: which weights are its own, whether they train, and whether PEFT saves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Adapters:
    """What PEFT has put on a model."""

    task_type: str | None
    modules_to_save: tuple[str, ...]
    layers: dict[str, nn.Module] | None
    """The modules that carry an adapter, by name; ``None`` for a method that has none, such as prompt tuning."""
    saved: frozenset[str]
    """Names in what PEFT saves."""


def adapters_of(model: nn.Module) -> Adapters | None:
    """What PEFT has put on the model, or ``None`` for a model without an adapter."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    from peft import get_peft_model_state_dict

    name = next(iter(active_names(model)), next(iter(configs)))
    config: Any = configs.get(name) or next(iter(configs.values()))
    task = getattr(config, "task_type", None)
    layers = None
    if not getattr(config, "is_prompt_learning", False):
        layers = {at: m for at, m in model.named_modules() if _is_adapted(m)}
    saved = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return Adapters(
        task_type=str(getattr(task, "value", task)) if task is not None else None,
        modules_to_save=tuple(dict.fromkeys(getattr(config, "modules_to_save", None) or ())),
        layers=layers,
        saved=frozenset(saved),
    )


def active_names(model: nn.Module) -> list[str]:
    """Names of the active adapters."""
    active: Any = getattr(model, "active_adapters", None)
    active = active() if callable(active) else active
    return [active] if isinstance(active, str) else list(active or ())


def own_weights(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of a module itself, as the forward uses them, by their names without PEFT's wrappers.

    Of a module in ``modules_to_save`` the copy that trains, of an adapted layer the layer under the adapter.
    """
    if _is_saved_copy(module):
        inner: Any = module
        active = [name for name in inner.active_adapters if name in inner.modules_to_save]
        yield from own_weights(inner.modules_to_save[active[0]] if active else inner.original_module, prefix)
    elif _is_adapted(module):
        base: Any = module.base_layer
        yield from own_weights(base, prefix)
    else:
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            yield name, parameter
        for name, child in module.named_children():
            yield from own_weights(child, f"{prefix}.{name}" if prefix else name)


def initial_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that PEFT copied for ``modules_to_save``, by name; empty for a module that is not in it."""
    inner: Any = module
    return dict(own_weights(inner.original_module)) if _is_saved_copy(module) else {}


def is_adapted(module: nn.Module) -> bool:
    """Whether an adapter works on the module or on a part of it."""
    return any(_is_adapted(m) for m in module.modules())


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer")


def _is_saved_copy(module: nn.Module) -> bool:
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")
