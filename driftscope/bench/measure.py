"""Measures one path on one problem: error against the truth, peak memory, time.

Time is taken in two ways, because a GPU at its power limit slows down within a tenth of a second of dense products:
``rested``, single steps after a pause, and ``sustained``, steps back to back as in training.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftscope.bench.paths import Path
from driftscope.bench.problem import Problem, Truth

PAUSE_S = 0.3
RESTED_STEPS = 3
SUSTAINED_STEPS = 6  # the median of the last half counts
LIMIT_SIDE = 8192  # of the square products that stand for the card's limit
BURST_PRODUCTS = 10


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times in milliseconds of one forward and backward, memory over what was held before, relative errors."""

    name: str
    note: str
    rested_ms: float | None = None
    sustained_ms: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    hidden_error: float | None = None  # |g - truth| / |truth|
    weight_error: float | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The card's rate in dense products of ``LIMIT_SIDE``, operations a second."""

    burst: float  # ten products after a pause
    rested: float  # as many as the problem's own products need, after a pause
    sustained: float  # the same, back to back


def relative_error(value: Tensor, true: Tensor) -> float:
    """|value - true| / |true| in float32, slice by slice; NaN never compares as small."""
    square = norm = 0.0
    for a, b in zip(value.split(8192), true.split(8192), strict=True):
        square += float((a.float() - b.float()).double().square().sum())
        norm += float(b.double().square().sum())
    return float((square / norm) ** 0.5) if norm > 0 else float(square**0.5)


def measure_path(problem: Problem, true: Truth, name: str, path: Path, note: str, *, timed: bool) -> Measurement:
    """Errors, memory and times of one path; a path that raises is reported as failed."""
    hidden = problem.hidden_ND.detach().clone().requires_grad_(True)
    weight = problem.weight_VD.detach().requires_grad_(problem.case.trainable)

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        loss = path(hidden, weight)
        loss.backward()
        return loss

    try:
        loss = float(step().detach())
        assert hidden.grad is not None
        errors = {"hidden_error": relative_error(hidden.grad, true.hidden_ND)}
        if true.weight_VD is not None:
            assert weight.grad is not None
            errors["weight_error"] = relative_error(weight.grad, true.weight_VD)
        facts: dict[str, Any] = {"loss": loss, **errors}
        if not timed:
            return Measurement(name=name, note=note, **facts)
        hidden.grad = weight.grad = None
        peak = peak_bytes(step)
        rested, sustained = times_ms(step)
        return Measurement(name=name, note=note, peak_bytes=peak, rested_ms=rested, sustained_ms=sustained, **facts)
    except Exception as error:  # noqa: BLE001 - a peer that fails is a result, not the end of the run
        return Measurement(name=name, note=note, failed=f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        hidden.grad = weight.grad = None
        clear()


def clear() -> None:
    """Give freed memory back, so that paths do not inherit each other's blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(step: Callable[[], object]) -> int:
    """Most memory allocated in one step over what was allocated before it."""
    clear()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times_ms(step: Callable[[], object]) -> tuple[float, float]:
    """Rested and sustained milliseconds of a step, medians of CUDA event times; slow steps are repeated less."""
    rested = []
    for _ in range(RESTED_STEPS):
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        rested.append(_timed(step, 1)[0])
        if rested[0] > 500.0:
            break
    steps = SUSTAINED_STEPS if rested[0] < 500.0 else 2
    sustained = _timed(step, steps)
    return statistics.median(rested), statistics.median(sustained[steps // 2 :])


def _timed(step: Callable[[], object], steps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def measure_limit(operations: float, dtype: torch.dtype, device: torch.device) -> Limit:
    """What the card's own library reaches on random square products that hold this many operations in all."""
    a, b = (torch.randn(LIMIT_SIDE, LIMIT_SIDE, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    each = 2.0 * LIMIT_SIDE**3
    count = max(1, round(operations / each))

    def products(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(number):
                torch.mm(a, b, out=out)

        return run

    products(3)()
    burst_ms, _ = times_ms(products(BURST_PRODUCTS))
    rested_ms, sustained_ms = times_ms(products(count))
    return Limit(
        burst=each * BURST_PRODUCTS / burst_ms * 1e3,
        rested=each * count / rested_ms * 1e3,
        sustained=each * count / sustained_ms * 1e3,
    )
