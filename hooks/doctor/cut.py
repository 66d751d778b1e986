"""Where a gradient's way from the loss to a parameter is cut, read from the record of module calls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from driftscope.doctor.facts import CutKind
from driftscope.hooks.doctor.calls import Call, Calls, clean


@dataclass(frozen=True)
class Cut:
    """One place where the graph is cut. ``name`` is ``None`` after the model's output."""

    kind: CutKind
    name: str | None
    begin: float = math.inf
    """Position in the forward."""


def first_cut(model: nn.Module, missing: Iterable[str], calls: Calls) -> tuple[Cut | None, int]:
    """The cut that comes first in the forward, and how many different ones there are."""
    modules = dict(model.named_modules())
    owners = {name.rpartition(".")[0] for name in missing}
    cuts = {_cut_of(owner, modules, calls) for owner in owners}
    ordered = sorted(cuts, key=lambda cut: (cut.begin, cut.name or ""))
    return (ordered[0] if ordered else None), len(ordered)


def _cut_of(owner: str, modules: dict[str, nn.Module], calls: Calls) -> Cut:
    """The cut between the loss and the parameters of a module."""
    uncalled, at = None, owner
    while at not in calls.begun:
        if type(modules[at]).forward is not nn.Module.forward:  # no mere container
            uncalled = at
        if not at:
            return Cut("not called", "")
        at = at.rpartition(".")[0]
    if uncalled is not None:
        return Cut("not called", clean(uncalled))
    made = calls.begun[at]
    forward = [call for call in made if call.scope is None]
    chosen = [c for c in forward if c.grad] or [c for c in made if c.grad] or made
    call = chosen[-1]
    return _downstream(call, calls) if call.grad else _without_graph(call, calls)


def _without_graph(call: Call, calls: Calls) -> Cut:
    """The cut for a call during which autograd did not record."""
    block = call.block
    if block is not None and isinstance(block.first, Call):
        first: Call = block.first
        if not block.inputs_need:
            kind: CutKind = "reentrant-keyword" if first.needs else "reentrant"
            return Cut(kind, clean(first.name), first.begin)
        return _downstream(first, calls)  # its output has a graph, but no gradient came for it
    top = call
    while top.parent is not None and not top.parent.grad:
        top = top.parent
    around = top.parent
    if around is not None and all(not c.grad for c in calls.ended if c.parent is around):
        top = around  # none of its modules records: it is no_grad as a whole
    return Cut("no_grad", clean(top.name), top.begin)


def _downstream(call: Call, calls: Calls) -> Cut:
    """The cut behind a call whose output is part of a graph."""
    if call.gives is False and call.grad:
        return Cut("detached", clean(call.name), call.begin)
    if call.arrived:
        return Cut("inside", clean(call.name), call.begin)
    reached = call.parent
    while reached is not None and not reached.arrived:
        reached = reached.parent
    end, limit = call.end or math.inf, (reached.end if reached is not None else None) or math.inf
    after = [c for c in calls.ended if c.scope is call.scope and end < (c.end or 0) < limit]
    found = [c for c in after if _loses(c, call)]
    likely = [c for c in found if c.same_shape or not c.grad or call.within(c)]
    for later in likely or found:
        return Cut("detached" if later.grad else "reentrant-keyword", clean(later.name), later.begin)
    if reached is not None:
        return Cut("inside", clean(reached.name), reached.begin)
    return Cut("after", None)


def _loses(later: Call, call: Call) -> bool:
    """Whether a later call gets something with a graph, and gives something without one."""
    if later.grad:
        return later.gives is False and (call.within(later) or (later.needs and not later.arrived_in))
    block = later.block
    return block is not None and block.first is later and later.needs and not block.inputs_need
