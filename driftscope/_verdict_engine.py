"""What the canary says of the sampling engine, in words: which weights it runs on, and what makes the ratio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from driftscope._text import percent, printable, sig
from driftscope.records import CanaryRecord, StepRecord
from driftscope.rules._ratios import applied_mean
from driftscope.rules.base import finite

ENGINE_RULES = {
    "stale_weights": "DS207",
    "stale_module": "DS208",
    "adapter_missing": "DS209",
    "temperature": "DS210",
}
CAUSE_WORDS = {
    "truncated_support": "truncated sampling",
    "temperature": "another temperature",
    "stale_weights": "stale weights",
    "stale_module": "a stale module",
    "adapter_missing": "a missing adapter",
    "engine_noise": "engine noise",
}
NOISE = "engine_noise"
ROUNDING = 3.0
"""Multiple of the noise floor up to which what is left counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What the looks of the canary have in common. ``named``: cause id -> number of looks that name it."""

    looks: int
    last: StepRecord
    named: dict[str, int]
    first: dict[str, int]
    """Cause id -> first step that names it."""
    off: int
    """Looks at which the engine did not agree with the current weights."""
    first_off: int | None
    worst: CanaryRecord
    """The latest look at which it did not, else the last look."""

    def main(self, rules: Iterable[str]) -> str | None:
        """The cause that most looks name, of those whose rule fired; weights before the temperature among equals."""
        fired = set(rules)
        order = [i for i, rule in ENGINE_RULES.items() if rule in fired]
        return max(order, key=lambda i: (self.named.get(i, 0), -order.index(i))) if order else None


@dataclass
class EngineTally:
    """The looks of the canary so far, from records as plain JSON objects in file order."""

    looks: int = 0
    last: dict[str, Any] | None = None
    named: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    off: int = 0
    first_off: int | None = None
    worst: dict[str, Any] | None = None
    """The canary of the latest look at which the engine did not agree with the current weights."""

    def add(self, record: dict[str, Any]) -> None:
        """Take in one record, if the canary looked at it."""
        look = record.get("canary")
        if look is None:
            return
        self.looks += 1
        self.last = {name: record.get(name) for name in _LOOKED_AT}
        causes = (record.get("is_ratio") or {}).get("causes") or ()
        for cause in sorted({c["id"] for c in causes}):
            self.named[cause] += 1
            self.first.setdefault(cause, record["step"])
        if look.get("agrees_with", "current") != "current":
            self.off += 1
            self.first_off = record["step"] if self.first_off is None else self.first_off
            self.worst = look

    def merge(self, other: EngineTally) -> None:
        """Take in a later part of the run."""
        self.looks += other.looks
        self.last = other.last or self.last
        self.named.update(other.named)
        self.first = other.first | self.first
        self.off += other.off
        self.first_off = other.first_off if self.first_off is None else self.first_off
        self.worst = other.worst or self.worst

    def engine(self) -> Engine | None:
        """What the looks have in common, or ``None`` where the canary never looked."""
        if self.last is None:
            return None
        last = StepRecord.model_validate(self.last)
        worst = CanaryRecord.model_validate(self.worst) if self.worst is not None else last.canary
        return Engine(
            looks=self.looks, last=last, named=dict(self.named), first=dict(self.first), off=self.off,
            first_off=self.first_off, worst=worst or CanaryRecord(),
        )  # fmt: skip


_LOOKED_AT = ("step", "micro_step", "live", "is_ratio", "canary")


def gather_engine(steps: Iterable[StepRecord]) -> Engine | None:
    """The looks of a run, or ``None`` where the canary never looked."""
    tally = EngineTally()
    for record in steps:
        if record.canary is not None:
            tally.add(record.model_dump(by_alias=True, warnings=False, include=set(_LOOKED_AT)))
    return tally.engine()


def sampling_line(engine: Engine | None) -> str | None:
    """One line of cause from the latest look: ``IS ratio 0.0049: truncated sampling 100%, engine noise 0%``."""
    if engine is None or engine.last.is_ratio is None:
        return None
    parts = shares(engine.last)
    mean = applied_mean(engine.last.is_ratio)
    return f"IS ratio {sig(mean)}: {', '.join(parts)}" if parts else None


def shares(record: StepRecord) -> list[str]:
    """``truncated sampling 89%`` and so on, largest first, engine noise last."""
    if record.is_ratio is None:
        return []
    found = [(c.id, s) for c in record.is_ratio.causes if (s := finite(c.share)) is not None and c.id in CAUSE_WORDS]
    found.sort(key=lambda row: (row[0] == NOISE, -abs(row[1]), row[0]))
    return [f"{CAUSE_WORDS[name]} {_share(share)}" for name, share in found]


def _share(share: float) -> str:
    """Small shares of either sign are 0%; a negative one is a part that works against the others."""
    if abs(share) < 0.0005:
        return "0%"
    return percent(share) if share > 0 else f"-{percent(-share)}"


def weights_words(look: CanaryRecord) -> str:
    """What the engine agrees with at one look."""
    if look.agrees_with == "previous":
        return f"the weights of step {look.snapshot_step}" if look.snapshot_step is not None else "older weights"
    if look.agrees_with == "adapter_off":
        return "the model without its adapters"
    if look.agrees_with == "part":
        return f"the current weights but for an old {modules_words(look)}"
    return "the current weights"


def modules_words(look: CanaryRecord) -> str:
    """The stale modules by name, at most four."""
    names = [printable(n) for n in look.stale_modules]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "part of them"


def canary_words(engine: Engine) -> str:
    """Which weights the engine agreed with over the run, and what is left unexplained at the last look."""
    looks = f"{engine.looks} look" + ("s" if engine.looks != 1 else "")
    if engine.off:
        words = weights_words(engine.worst)
        when = f"in {engine.off} of {looks}" if engine.off < engine.looks else f"in all {looks}"
        text = f"The sampling engine agrees with {words}, {when} of the canary, first at step {engine.first_off}."
    else:
        where = f"in all {looks}" if engine.looks > 1 else "in the one look"
        text = f"The sampling engine agrees with the current weights {where} of the canary."
    return f"{text} {_size_words(engine.last)}".strip()


def _size_words(record: StepRecord) -> str:
    """How large the log ratio is at this look, and how much of it nothing explains."""
    look = record.canary
    if look is None or finite(look.rms) is None:
        return ""
    text = f"At step {record.step} the log ratio is {sig(look.rms)} nats a token (rms)"
    rest, floor = finite(look.rest_rms), finite(look.noise_floor)
    if rest is None or floor is None:
        return text + "; the noise floor is unavailable."
    if rest <= ROUNDING * floor:
        above = look.rms is not None and look.rms > ROUNDING * floor
        left = f"and what no cause explains, {sig(rest, 2)}, is rounding" if above else "which is rounding"
        return f"{text}, {left} (noise floor {sig(floor, 2)})."
    text += f", of which {sig(rest, 2)} is unexplained: {rest / max(floor, 1e-30):.0f} times the noise floor"
    coarse = finite(look.bf16_noise)
    if coarse is not None and rest <= ROUNDING * coarse:
        text += f", within what bfloat16 makes in this model ({sig(coarse, 2)})"
    return text + "."


def engine_headline(engine: Engine, cause: str) -> str:
    """What is wrong with the engine, as the start of a sentence."""
    look, since = engine.worst, engine.first.get(cause)
    when = f" since step {since}" if since is not None and since > 1 else ""
    if cause == "stale_weights":
        step = f" (those of step {look.snapshot_step})" if look.snapshot_step is not None else ""
        return f"The sampling engine runs on old weights{step}{when}"
    if cause == "stale_module":
        names = f" ({modules_words(look)})" if look.stale_modules else ""
        return f"A part of the sampling engine's weights{names} is old{when}"
    if cause == "adapter_missing":
        return f"The sampling engine runs without the adapter{when}"
    return f"The sampling engine's log-probs are of another temperature than the trainer's{when}"
