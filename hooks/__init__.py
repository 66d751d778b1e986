"""What touches a trainer: ``attach``, and the callback that attaches by itself. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftscope.hooks.callback import DriftscopeCallback
    from driftscope.hooks.scope import Scope, attach

__all__ = ["DriftscopeCallback", "Scope", "attach"]

_HOME = {
    "DriftscopeCallback": "driftscope.hooks.callback",
    "Scope": "driftscope.hooks.scope",
    "attach": "driftscope.hooks.scope",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
