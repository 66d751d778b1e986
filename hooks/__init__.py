"""What touches a trainer: ``attach``, and the callback that attaches by itself. Names load on first use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftscope.hooks.attach import Scope, attach
    from driftscope.hooks.callback import DriftscopeCallback

__all__ = ["DriftscopeCallback", "Scope", "attach"]

_HOME = {
    "DriftscopeCallback": "driftscope.hooks.callback",
    "Scope": "driftscope.hooks.attach",
    "attach": "driftscope.hooks.attach",
}


class _Package(ModuleType):
    """Keeps ``driftscope.hooks.attach`` the function.

    A submodule of that name exists, and the import system would bind it over the function when it is imported.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
