"""The measured transform of the output head in words."""

from __future__ import annotations

from driftscope._text import printable, sig
from driftscope.records import StepRecord


def head_words(record: StepRecord) -> str:
    """What the model's head does beyond ``lm_head.weight``, as measured; empty where nothing is known."""
    parts = []
    for name, value in record.head.items():
        if value is None or value is False or value == [] or (name == "scale" and value == 1):
            continue
        if value is True:
            parts.append(printable(str(name)))
        elif isinstance(value, int | float):
            parts.append(f"{printable(str(name))}={sig(float(value), 4)}")
        else:
            parts.append(f"{printable(str(name))}={printable(str(value))[:80]}")
    return "measured head: " + ", ".join(parts) if parts else ""
