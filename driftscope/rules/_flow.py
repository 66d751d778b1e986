"""What the rules about gradient flow share."""

from __future__ import annotations

from collections.abc import Iterator

from driftscope._text import printable, sig
from driftscope.doctor.facts import Facts, FlowFix, GradientFlow


def flows(facts: Facts) -> Iterator[GradientFlow]:
    """The flows that were measured: of the policy, of the reward model."""
    if facts.flow is not None:
        yield facts.flow
    if facts.reward is not None and facts.reward.flow is not None:
        yield facts.reward.flow


def best_fix(flow: GradientFlow) -> FlowFix | None:
    """The first remedy that works."""
    return next((fix for fix in flow.fixes if fix.works), None)


def remedy(flow: GradientFlow, static: str) -> str:
    """The line of the best remedy that works, and the others with what each costs; the static text without one."""
    best = best_fix(flow)
    if best is None:
        return static
    others = [fix for fix in flow.fixes if fix.works and fix is not best]
    text = f"{best.line}{_cost(best)}."
    if others:
        text += f" Or: {'; '.join(f'{fix.line}{_cost(fix)}' for fix in others)}."
    return text


def evidence(flow: GradientFlow) -> str:
    """How many parameters, where, and what was raised."""
    lost = len(flow.missing)
    parts = [f"{lost} of {flow.trainable} trainable parameters get no gradient"]
    if flow.zero:
        parts.append(f"{len(flow.zero)} get an exact zero")
    if flow.adapters:
        parts.append(f"{flow.adapters_missing} of {flow.adapters} adapter parameters are among them")
    if flow.cut_at is not None:
        parts.append(f"cut at {printable(flow.cut_at)}")
    if flow.error is not None:
        parts.append(f"the backward raised: {printable(flow.error.strip().splitlines()[0])}")
    failed = [fix.name for fix in flow.fixes if not fix.works]
    if failed:
        parts.append(f"tried without success: {', '.join(failed)}")
    return "; ".join(parts)


def _cost(fix: FlowFix) -> str:
    if fix.saved_bytes is None:
        return ""
    return f" (the forward keeps {_bytes(fix.saved_bytes)} for the backward of the batch measured)"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{sig(count / size)} {unit}"
    return f"{count} bytes"
