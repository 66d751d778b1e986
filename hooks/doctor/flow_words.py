"""A gradient flow in one sentence: what happens, where, and why."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import GradientFlow

_WHY = {
    "reentrant": (
        "gradient checkpointing is reentrant and no input of {at} requires a gradient (what comes before is frozen), "
        "so the block is run without a graph and never recomputed"
    ),
    "reentrant-keyword": (
        "gradient checkpointing is reentrant and {at} gets its hidden states as a keyword argument, of which "
        "reentrant checkpointing keeps no graph"
    ),
    "detached": "the output of {at} is detached: it requires no gradient although what goes into it does",
    "inside": "the graph is cut inside the forward of {at}: a gradient arrives at its output and goes no further",
    "not called": "{at} is not called in the forward, so nothing in it reaches the loss",
    "no_grad": "{at} runs under no_grad",
    "after": "the loss does not depend on the model's output through a graph",
}


def describe(flow: GradientFlow, places: int = 1) -> str:
    """One sentence. places: the number of different places where the graph is cut."""
    if not flow.trainable:
        raised = f"; the backward raises: {_one_line(flow.error)}" if flow.error else ""
        return f"The model has no trainable parameter: requires_grad is False everywhere{raised}."
    if flow.ok:
        return f"All {flow.trainable} trainable parameters get a gradient."
    lost = flow.missing or flow.zero
    none = "gets no gradient" if len(lost) == 1 else "get no gradient"
    what = f"{len(lost)} of {flow.trainable} trainable parameters {none}"
    if flow.error is not None:
        what = f"The backward raises ({_one_line(flow.error)}), so {what}"
    elif not flow.missing:
        what = f"{len(lost)} of {flow.trainable} trainable parameters have a gradient of exactly zero"
    elif flow.zero:
        what += f", {len(flow.zero)} a gradient of exactly zero"
    if flow.cut_kind is None:
        return f"{what}, {printable(lost[0])} first."
    why = _WHY[flow.cut_kind].format(at=flow.cut_at)
    more = f" (the first of {places} such places)" if places > 1 else ""
    return f"{what}: {why}{more}."


def _one_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return printable(lines[0]) if lines else ""
