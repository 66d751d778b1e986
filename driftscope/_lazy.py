"""Public names that load on first use (PEP 562), so that importing a package brings in none of its dependencies."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    namespace: dict[str, Any], home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    namespace: the package's ``globals()``. home: public name -> module that holds it, or is it.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        module = importlib.import_module(home[name])
        value = module if home[name] == f"{namespace['__name__']}.{name}" else getattr(module, name)
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *home})

    return get, names
