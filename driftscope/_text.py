"""Numbers and names as people read them, shared by rules, verdict and command line."""

from __future__ import annotations

import math

PATHS = {
    "liger": "the fused Liger path",
    "reference": "TRL's own path",
    "corrected": "the corrected kernel's path",
    "oracle": "the configured loss in float64",
}


def path_words(name: str) -> str:
    """A loss path in words."""
    return PATHS.get(name, f"the path {printable(name)!r}")


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def sig(value: float | None, digits: int = 3) -> str:
    """A number with that many significant digits, ``unavailable`` for ``None`` and non-finite values."""
    if value is None or not math.isfinite(value):
        return "unavailable"
    if value == 0:
        return "0"
    if 10.0 ** (digits - 1) <= abs(value) < 1e6:
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}e}"


def percent(share: float | None) -> str:
    """A share in [0, 1] as a percentage."""
    if share is None or not math.isfinite(share):
        return "an unknown part"
    value = 100.0 * share
    return f"{value:.0f}%" if value >= 9.95 or value == 0 else f"{value:.1f}%"


def times(ratio: float) -> str:
    """A ratio as ``118x larger`` or ``3.20x smaller``."""
    if ratio >= 1:
        return f"{sig(ratio)}x larger"
    return f"{sig(1 / ratio)}x smaller" if ratio > 0 else "zero"


def printable(text: str) -> str:
    """Text without control characters, so that data cannot steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
