"""What touches a trainer: ``attach``, and the callback that attaches by itself. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.hooks.callback import DriftscopeCallback
    from driftscope.hooks.scope import Scope, attach

__all__ = ["DriftscopeCallback", "Scope", "attach"]

_HOME = {
    "DriftscopeCallback": "driftscope.hooks.callback",
    "Scope": "driftscope.hooks.scope",
    "attach": "driftscope.hooks.scope",
}

__getattr__, __dir__ = lazy_names(globals(), _HOME)
