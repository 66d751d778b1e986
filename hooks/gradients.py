"""Full-parameter gradients of one accumulation window: kept where they are small, else sketched and packed for ranks.

Three of them: of the live path, recomputed; of the path it is compared with; and what the trainer has accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from driftscope.sketch import ExactGradient, GradientSketch, Pair, SketchLayout, exact_pair
from driftscope.sketch.exact import widened

PATHS = ("liger", "reference", "corrected", "oracle")
SLOTS = ("live", "other", "accumulated")


@dataclass
class PathGradient:
    """Gradient of one path, summed over the micro-batches of a window."""

    held: ExactGradient | GradientSketch
    micro_batches: int = 0


@dataclass
class Accumulated:
    """What the trainer accumulated, before clipping. Sketched: ``sketch`` and the exact norm; kept: ``pair`` with the
    live path (a: accumulated) and the sketch of the difference.
    """

    norm: float
    sketch: GradientSketch | None = None
    pair: Pair | None = None
    difference: GradientSketch | None = None
    nonfinite: list[str] = field(default_factory=list)


@dataclass
class Window:
    """The gradients of the current window. ``other``: name of the path that the live one is compared with."""

    live: str | None = None
    other: str | None = None
    paths: dict[str, PathGradient] = field(default_factory=dict)
    accumulated: Accumulated | None = None

    def clear(self) -> None:
        """Let go of everything."""
        self.live = self.other = self.accumulated = None
        self.paths = {}

    def complete(self, name: str | None, micro_batches: int) -> PathGradient | None:
        """The gradient of a path if it holds all micro-batches of the window."""
        path = self.paths.get(name) if name is not None else None
        return path if path is not None and path.micro_batches == micro_batches else None


@dataclass(frozen=True)
class Found:
    """The products of a whole window, of all ranks: what a record is filled from.

    pair: live (a) and other (b). accumulated: accumulated (a) and live (b), with the exact norm of the first where
    sketched, and the sketch of their difference. why: the reason where there is nothing.
    """

    live: str
    other: str | None = None
    size: int | None = None
    pair: Pair | None = None
    accumulated: Pair | None = None
    norm: float | None = None
    difference: GradientSketch | None = None
    nonfinite: list[str] = field(default_factory=list)
    why: str | None = None


def take_accumulated(
    window: Window, layout: SketchLayout, parameters: dict[str, nn.Parameter], scale: float
) -> Accumulated:
    """Look at ``.grad`` as the trainer is about to clip it. scale: what undoes a gradient scaler's factor."""
    live = window.paths[window.live or ""].held
    if isinstance(live, ExactGradient):

        def grad(name: str) -> Tensor | None:
            found = parameters[name].grad
            return widened(found, scale) if found is not None else None

        difference = GradientSketch(layout)
        pair = exact_pair(grad, live.grads.get, layout, difference)
        return Accumulated(float(pair.aa.sum().sqrt()), pair=pair, difference=difference)
    sketch, squares = GradientSketch(layout), []
    for name, p in parameters.items():
        if p.grad is not None:
            sketch.add(name, p.grad, scale=scale)
            wide = torch.float64 if p.grad.dtype == torch.float64 else torch.float32
            squares.append(torch.linalg.vector_norm(p.grad, dtype=wide).double().cpu() ** 2)
    norm = float(torch.stack(squares).sum().sqrt()) * scale if squares else 0.0
    return Accumulated(norm, sketch=sketch)


def exact_found(window: Window, layout: SketchLayout, micro_batches: int) -> Found:
    """The products of a window whose gradients were kept."""
    live, other = window.complete(window.live, micro_batches), window.complete(window.other, micro_batches)
    name = window.live or ""
    if live is None or not isinstance(live.held, ExactGradient):
        return Found(name, why="the live path was not recomputed for every micro-batch of the window")
    pair = None
    bad = live.held.nonfinite()
    if other is not None and isinstance(other.held, ExactGradient):
        pair = exact_pair(live.held.grads.get, other.held.grads.get, layout)
        bad += other.held.nonfinite()
    else:
        pair = exact_pair(live.held.grads.get, live.held.grads.get, layout)
    seen = window.accumulated
    if seen is not None and seen.pair is not None:
        bad += [n for n, x in zip(layout.rows, torch.isfinite(seen.pair.aa).tolist(), strict=True) if not x]
    return Found(
        live=name,
        other=window.other if other is not None else None,
        pair=pair,
        accumulated=seen.pair if seen is not None else None,
        difference=seen.difference if seen is not None else None,
        nonfinite=list(dict.fromkeys(bad)),
    )


def packed_size(layout: SketchLayout) -> int:
    """Numbers in a pack: the same on every rank, and at every window."""
    return 2 + len(SLOTS) + len(PATHS) + len(SLOTS) * len(layout.rows) * (1 + layout.size)


def pack(window: Window, layout: SketchLayout, micro_batches: int) -> Tensor:
    """A window's sketches as one float64 array on the host; those of all ranks add up.

    Head: 1, squared norm of what was accumulated, which slots are complete, which path is the other. Then, by slot and
    row, 1 where something is not finite; then the rows, zero there: a sum over ranks must not be spoilt unseen.
    """
    seen = window.accumulated
    paths = [window.complete(name, micro_batches) for name in (window.live, window.other)]
    held = [path.held if path is not None else None for path in paths]
    sketches = [h if isinstance(h, GradientSketch) else None for h in held] + [
        seen.sketch if seen is not None else None
    ]
    shape = (len(SLOTS), len(layout.rows), layout.size)
    rows = torch.zeros(shape, dtype=torch.float64)
    for slot, sketch in zip(rows, sketches, strict=True):
        if sketch is not None:
            slot.copy_(sketch.rows_RK)
    bad = (~torch.isfinite(rows)).any(-1)
    rows[bad] = 0.0
    square = seen.norm**2 if seen is not None else 0.0
    head = [1.0, square if square < float("inf") else 0.0, *(float(s is not None) for s in sketches)]
    head += [float(name == window.other) for name in PATHS]
    return torch.cat([torch.tensor(head, dtype=torch.float64), bad.double().reshape(-1), rows.reshape(-1)])


def unpack(packed: Tensor, layout: SketchLayout, live: str, processes: int) -> Found:
    """The products of the mean over ranks, from the sum of their packs."""
    _, square, *rest = packed[: 2 + len(SLOTS) + len(PATHS)].tolist()
    complete = {slot: n == processes for slot, n in zip(SLOTS, rest, strict=False)}
    if not complete["live"]:
        ranks = f" on {processes - int(rest[0])} of {processes} ranks" if processes > 1 else ""
        return Found(live, why=f"the live path was not recomputed for every micro-batch of the window{ranks}")
    chosen = [name for name, n in zip(PATHS, rest[len(SLOTS) :], strict=True) if n == processes]
    body = packed[2 + len(SLOTS) + len(PATHS) :]
    rows = len(SLOTS) * len(layout.rows)
    bad = body[:rows].view(len(SLOTS), -1) > 0
    sketches = body[rows:].view(len(SLOTS), len(layout.rows), layout.size) / processes
    parts = {slot: GradientSketch(layout, s) for slot, s in zip(SLOTS, sketches, strict=True)}
    other = chosen[0] if complete["other"] and chosen else None
    used = [i for i, slot in enumerate(SLOTS) if complete[slot] and (slot != "other" or other)]
    found = torch.stack([bad[i] for i in used]).any(0).nonzero().squeeze(1).tolist()
    live_sketch, seen = parts["live"], parts["accumulated"] if complete["accumulated"] else None
    return Found(
        live=live,
        other=other,
        size=layout.size,
        pair=Pair.of(live_sketch, parts["other"] if other is not None else live_sketch),
        accumulated=Pair.of(seen, live_sketch) if seen is not None else None,
        norm=(square / processes) ** 0.5 if seen is not None else None,
        difference=seen.minus(live_sketch) if seen is not None else None,
        nonfinite=[layout.rows[i] for i in found],
    )
