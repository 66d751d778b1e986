"""Any Python value as plain, finite JSON types, with the names of the values that were not finite."""

from __future__ import annotations

import math
from typing import Any

LARGEST = 2**63


def to_jsonable(value: Any) -> tuple[Any, list[str]]:
    """``value`` as dicts, lists, strings, numbers and ``None``, and the dotted names of its NaN and infinite numbers.

    An integer that does not fit in 64 bits counts as infinite: no reader can be expected to take it. A numeric scalar
    of another library becomes a Python number, anything else unknown its ``str``; characters that UTF-8 cannot hold
    become ``?``.
    """
    nonfinite: list[str] = []
    return _convert(value, "", nonfinite), nonfinite


def _convert(value: Any, name: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if -LARGEST <= value < LARGEST:
            return int(value)
        nonfinite.append(name)
        return None
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(name)
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_key(k): _convert(v, _join(name, _key(k)), nonfinite) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_convert(v, _join(name, str(i)), nonfinite) for i, v in enumerate(value)]
    if hasattr(value, "item"):
        try:
            return _convert(value.item(), name, nonfinite)
        except (TypeError, ValueError, RuntimeError, RecursionError):
            pass
    return _convert(str(value), name, nonfinite)


def _key(key: Any) -> str:
    return str(key).encode("utf-8", "replace").decode("utf-8")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def drop_incomplete(step: dict[str, Any]) -> None:
    """Make a step readable whose required numbers were not finite (in place).

    A cause or an ``unexplained`` without a share is unavailable, not zero: it is removed (its field stays named in
    ``nonfinite``). ``overhead_ms`` becomes 0.
    """
    for holder in (step, step.get("is_ratio")):
        if isinstance(holder, dict) and isinstance(holder.get("causes"), list):
            holder["causes"] = [c for c in holder["causes"] if not (isinstance(c, dict) and c.get("share", 0) is None)]
    unexplained = step.get("unexplained")
    if isinstance(unexplained, dict) and unexplained.get("share", 0) is None:
        step["unexplained"] = None
    if step.get("overhead_ms", 0) is None:
        step["overhead_ms"] = 0.0
