"""The settings that a configuration can have: their types, read from dataclasses, and values brought to them."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from driftscope._text import printable
from driftscope.errors import UsageError

WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
}
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


@dataclass(frozen=True, kw_only=True)
class KnownField:
    """One setting. ``kinds``: the types it takes, keys of ``WORDS`` or ``any``; ``items``: those of a list's items."""

    name: str
    kinds: frozenset[str]
    items: frozenset[str] = frozenset()
    choices: tuple[Any, ...] = ()
    default: Any = None
    owner: str = ""

    @property
    def expected(self) -> str:
        """What it takes, in words."""
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        parts = [WORDS[kind] for kind in WORDS if kind in self.kinds]
        if self.kinds >= {"list"} and self.items and "any" not in self.items:
            each = " or ".join(WORDS[kind] for kind in WORDS if kind in self.items)
            parts[parts.index("a list")] = f"a list (each item {each})"
        return " or ".join(parts)


def fields_of(*classes: type) -> dict[str, KnownField]:
    """The settings that dataclasses have, by name; of two with the same name the first counts."""
    found: dict[str, KnownField] = {}
    for cls in classes:
        hints = _hints(cls)
        for field in dataclasses.fields(cls):
            if field.init and field.name not in found:
                found[field.name] = _known(field, hints.get(field.name, field.type), cls.__name__)
    return found


def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass; per field, so that one name that cannot be resolved does not hide the others."""
    try:
        return typing.get_type_hints(cls)
    except Exception:  # noqa: BLE001 - annotations of others, evaluated
        return {}


def _known(field: dataclasses.Field[Any], hint: Any, owner: str) -> KnownField:
    kinds, items, choices = _kinds(hint)
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        default = None if field.default is dataclasses.MISSING else field.default
    return KnownField(
        name=field.name,
        kinds=frozenset(kinds),
        items=frozenset(items),
        choices=tuple(field.metadata.get("choices") or choices),
        default=default,
        owner=owner,
    )


def _kinds(hint: Any) -> tuple[set[str], set[str], tuple[Any, ...]]:
    """Types, types of a list's items, and choices that an annotation admits."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        parts = [_kinds(arg) for arg in get_args(hint) if arg is not type(None)]
        kinds = set().union(*(p[0] for p in parts))
        choices = tuple(c for p in parts for c in p[2])
        return kinds, set().union(*(p[1] for p in parts)), choices if len(parts) == 1 else ()
    if origin is Literal:
        return {_name(type(arg)) for arg in get_args(hint) if arg is not None}, set(), get_args(hint)
    if origin in (list, tuple, set) or hint in (list, tuple, set):
        inner = get_args(hint)
        return {"list"}, _kinds(inner[0])[0] if inner else {"any"}, ()
    return {_name(origin or hint)}, set(), ()


def _name(cls: Any) -> str:
    if not isinstance(cls, type):
        return "any"
    if issubclass(cls, enum.Enum):
        return "str"
    if dataclasses.is_dataclass(cls):
        return "dict"
    return cls.__name__ if cls.__name__ in WORDS else "any"


def convert(field: KnownField, value: Any, source: str) -> Any:
    """The value as TRL will see it: text becomes the field's type, ``null`` stays, other types are checked.

    Text settings take any scalar, as in TRL (``scale_rewards: false``). Raises ``UsageError`` for a wrong type.
    """
    if value is None or "any" in field.kinds:
        return value
    try:
        made = _made(field.kinds, field.items, value)
    except (TypeError, ValueError):
        raise _wrong(field, value, source) from None
    if field.choices and made not in field.choices:
        raise _wrong(field, value, source)
    return made


def _made(kinds: frozenset[str], items: frozenset[str], value: Any) -> Any:
    """The value as the first type that takes it; raises ``ValueError`` or ``TypeError`` where none does."""
    if isinstance(value, str):
        return _from_text(kinds, items, value)
    if isinstance(value, list) and "list" in kinds:
        return [_made(items, frozenset(), item) if items and "any" not in items else item for item in value]
    if isinstance(value, dict) and "dict" in kinds:
        return value
    if isinstance(value, bool):
        fits = bool(kinds & {"bool", "str"})
    elif isinstance(value, int):
        fits = bool(kinds & {"int", "float", "str"})
    elif isinstance(value, float):
        fits = bool(kinds & {"float", "str"})
    else:
        fits = "str" in kinds and not isinstance(value, list | dict)  # dates
    if not fits:
        raise TypeError
    return float(value) if isinstance(value, int) and kinds & {"int", "float", "bool"} == {"float"} else value


def _from_text(kinds: frozenset[str], items: frozenset[str], text: str) -> Any:
    if text.lower() in ("none", "null") and "str" not in kinds:
        return None
    readers: tuple[tuple[str, Callable[[str], Any]], ...] = (
        ("bool", _bool),
        ("int", int),
        ("float", float),
        ("dict", _dict),
    )
    for kind, reader in readers:
        if kind in kinds:
            try:
                return reader(text)
            except (TypeError, ValueError):
                continue
    if "str" in kinds or ("list" in kinds and items & {"str", "any"}):  # one name for a list of names: all-linear
        return text
    raise ValueError


def _bool(text: str) -> bool:
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise ValueError


def _dict(text: str) -> dict[str, Any]:
    made = json.loads(text)
    if not isinstance(made, dict):
        raise TypeError
    return made


def _wrong(field: KnownField, value: Any, source: str) -> UsageError:
    shown = printable(repr(value))
    return UsageError(
        f"{source}: {field.name} is {shown if len(shown) < 80 else shown[:77] + '...'} "
        f"({type(value).__name__}), but {field.owner}.{field.name} takes {field.expected}."
    )
