"""Numbers and names as a reader meets them: sensible digits, plain labels, nothing that a terminal would obey."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

UNAVAILABLE = "–"

PATH_LABELS = {
    "liger": "Liger (fused)",
    "reference": "TRL reference",
    "corrected": "corrected",
    "oracle": "oracle",
}
PATH_ORDER = ("liger", "reference", "corrected", "oracle")

CAUSE_LABELS = {
    "is_correction": "importance sampling correction",
    "normalizer": "normaliser",
    "tool_mask": "tool mask",
    "kl_bias_correction": "KL bias correction",
    "delta_clamp": "delta clamp",
    "logit_transform": "logit transform",
    "head_adapter": "adapter on the head",
    "extra_terms": "extra loss terms",
    "accumulation_dtype": "accumulation dtype",
    "truncated_support": "truncated sampling support",
    "temperature": "another temperature",
    "stale_weights": "stale weights",
    "stale_module": "stale module",
    "adapter_missing": "adapter missing",
    "engine_noise": "engine noise",
    "sequence_product": "product over the sequence",
    "unexplained": "unexplained",
}

SERIES_LABELS = {
    "log_is_mean": "log of the mean IS ratio",
    "log_is_std": "log of the IS ratio's spread",
    "log_gap": "log of the gap in gradient norm",
}
WEIGHTS_LABELS = {
    "current": "current weights",
    "previous": "older weights",
    "adapter_off": "adapters off",
    "part": "older weights of a part",
}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def clean(text: str) -> str:
    """``text`` without characters that steer a terminal or the direction of writing; each becomes U+FFFD."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, as a power of ten outside 1e-4 to 1e6.

    None and non-finite values become a dash.
    """
    if value is None or not math.isfinite(value):
        return UNAVAILABLE
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):.{digits - 1}e}".split("e")[1])
    if not -4 <= exponent < 6:
        mantissa = f"{value:.{digits - 1}e}".split("e")[0]
        mantissa = (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa).replace("-", "−")
        return f"{mantissa}×10{str(exponent).translate(SUPERSCRIPT)}"
    places = max(0, digits - 1 - exponent)
    text = f"{value:,.{places}f}"
    if "." in text and float(value).is_integer():
        text = text.split(".")[0]
    return text.replace("-", "−")


def factor(value: float | None) -> str:
    """A factor: ``107×``, or a dash."""
    text = number(value)
    return text if text == UNAVAILABLE else f"{text}×"


def percent(value: float | None) -> str:
    """A share in [0, 1] as a percentage."""
    if value is None or not math.isfinite(value):
        return UNAVAILABLE
    if value != 0 and abs(value) < 0.001:
        return "under 0.1%"
    return f"{value * 100:.1f}%".replace(".0%", "%")


def count(n: int, singular: str, plural: str | None = None) -> str:
    """``1 step``, ``2 steps``, ``12,000 steps``."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def step_span(steps: Iterable[int]) -> str:
    """``step 3`` or ``steps 3 to 40``; empty for no steps."""
    seen = sorted(set(steps))
    if not seen:
        return ""
    return f"step {seen[0]}" if len(seen) == 1 else f"steps {seen[0]} to {seen[-1]}"


def path_label(name: str) -> str:
    """The reader's name of a loss path; an unknown one as recorded."""
    return PATH_LABELS.get(name, clean(name))


def cause_label(cause_id: str) -> str:
    """The reader's name of a cause; an unknown one as recorded."""
    return CAUSE_LABELS.get(cause_id, clean(cause_id))


def series_label(name: str) -> str:
    """The reader's name of a watched series; an unknown one as recorded."""
    return SERIES_LABELS.get(name, clean(name))


def weights_label(name: str) -> str:
    """The reader's name of a set of weights that the canary compares; an unknown one as recorded."""
    return WEIGHTS_LABELS.get(name, clean(name))


def ordered_paths(names: Iterable[str]) -> list[str]:
    """Known paths in their usual order, then the others by name."""
    present = set(names)
    return [p for p in PATH_ORDER if p in present] + sorted(present - set(PATH_ORDER))


def utc(seconds: float | None) -> str:
    """Seconds since the epoch as a UTC date and time."""
    if seconds is None or not math.isfinite(seconds):
        return UNAVAILABLE
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return UNAVAILABLE


def rule_page(rule: str) -> str:
    """Where the documentation of a rule stands."""
    return f"docs/rules/{clean(rule)}.md"
