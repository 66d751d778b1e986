"""One number of the report at a glance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A label, the number as text, and what it is."""

    label: str
    value: str
    hint: str
