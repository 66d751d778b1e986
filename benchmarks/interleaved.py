"""Awake and asleep steps side by side: Driftscope attached to one run, put to sleep and woken from step to step.

Blocks of detached and attached steps differ by more than the cost that is sought, since clocks and memory drift
between them. Here each awake step is set against the asleep steps next to it:

    asleep asleep awake | asleep asleep awake | ...    (paired.py; the light tier: asleep awake | asleep awake | ...)

Asleep means that every attribute which ``attach`` has put on the trainer is taken off again, and its callback too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paired import Plan, Step
from training import now
from transformers import TrainerCallback

import driftscope

ALWAYS: dict[
    str, dict[str, int]
] = {  # settings under which every awake step is of the tier, as at the default cadence
    "light": {"spectrum_every": 0, "deep_every": 0},
    "spectrum": {"spectrum_every": 1, "deep_every": 0, "spectrum_micro_batches": 1},
    "deep": {"spectrum_every": 1, "deep_every": 1},
}
ABSENT = object()


class Switch:
    """Attaches Driftscope so that every awake step is of one tier, and wakes it or puts it to sleep."""

    def __init__(self, trainer: Any, run_dir: Path, tier: str) -> None:
        owners = (trainer, trainer.accelerator)
        before = [dict(vars(owner)) for owner in owners]
        self.trainer = trainer
        self.scope = driftscope.attach(trainer, run_dir, console=False, report=False, max_overhead=0.0, **ALWAYS[tier])
        self.callback = self.scope.callback
        self._put = [
            (owner, name, was.get(name, ABSENT), put)
            for owner, was in zip(owners, before, strict=True)
            for name, put in vars(owner).items()
            if was.get(name, ABSENT) is not put
        ]
        self.is_awake = True

    def turn(self, awake: bool) -> None:
        """Wake it, or put it to sleep."""
        if awake == self.is_awake:
            return
        self.is_awake = awake
        callbacks = self.trainer.callback_handler.callbacks
        if awake:
            callbacks.append(self.callback)
        else:
            callbacks.remove(self.callback)
        for owner, name, was, put in self._put:
            value = put if awake else was
            if value is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def close(self) -> dict[str, str]:
        """Detach; returns the stages that failed, with the reason."""
        self.turn(True)
        self.scope.detach()
        return dict(self.scope.guard.off)


class Peak:
    """The highest device memory since ``start``, whoever resets the counter in between (the deep tier does)."""

    def __init__(self) -> None:
        self._seen, self._real = 0, torch.cuda.reset_peak_memory_stats
        self.on = torch.cuda.is_available()

    def __enter__(self) -> Peak:
        if self.on:
            torch.cuda.reset_peak_memory_stats = self._reset
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.reset_peak_memory_stats = self._real

    def _reset(self, *args: Any, **kwargs: Any) -> None:
        self._seen = max(self._seen, torch.cuda.max_memory_allocated())
        self._real(*args, **kwargs)

    def start(self) -> None:
        """Count from here."""
        if self.on:
            self._real()
            self._seen = 0

    def read(self) -> int | None:
        """Bytes."""
        return max(self._seen, torch.cuda.max_memory_allocated()) if self.on else None


class Stopwatch(TrainerCallback):
    """Times each step with the device idle at both ends; what the callbacks do at a step's end is in it."""

    def __init__(self, switch: Switch, plan: Plan, seconds: float, peak: Peak) -> None:
        self.switch, self.plan, self.seconds, self.peak = switch, plan, seconds, peak
        self.rows: list[Step] = []
        self._open: tuple[int, bool, int | None] | None = None
        self._begun = 0.0
        self._started: float | None = None
        self._stop = False

    def on_step_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        at = now()
        if self._open is not None:
            index, awake, held = self._open
            self.rows.append(Step(index, awake, (at - self._begun) * 1e3, self.peak.read(), held))
        self._started = at if self._started is None else self._started
        self._stop = self._late(at - self._started, state.global_step)
        awake = self.plan.awake(state.global_step)
        self.switch.turn(awake)
        self.peak.start()
        self._open = (state.global_step, awake, torch.cuda.memory_allocated() if self.peak.on else None)
        self._begun = now()

    def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        control.should_training_stop = control.should_training_stop or self._stop

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.switch.turn(True)

    def _late(self, spent: float, index: int) -> bool:
        """Whether the time is up after complete cycles."""
        return agreed(spent > self.seconds and self.plan.complete(index))


def agreed(answer: bool) -> bool:
    """Rank 0's answer, on every rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return answer
    told = torch.tensor([float(answer)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(told, 0)
    return bool(told.item())


@dataclass(frozen=True)
class Run:
    """What one tier's run gave."""

    rows: list[Step]
    plan: Plan
    own_ms: dict[int, float]  # by step index: what Driftscope itself recorded
    off: dict[str, str]
    live: str  # path that trains


def alternate(trainer: Any, run_dir: Path, tier: str, plan: Plan, seconds: float) -> Run:
    """Train once, awake and asleep in turn, for ``seconds`` at most (two cycles are always completed)."""
    switch = Switch(trainer, run_dir, tier)
    trainer.args.max_steps = plan.steps
    off: dict[str, str] = {}
    with Peak() as peak:
        watch = Stopwatch(switch, plan, seconds, peak)
        trainer.callback_handler.callbacks.insert(0, watch)
        try:
            trainer.train()
        finally:
            trainer.callback_handler.callbacks.remove(watch)
            off = switch.close()
    own: dict[int, float] = {}
    if trainer.accelerator.is_main_process:
        for record in driftscope.read_run(run_dir).steps:
            own[record.step - 1] = own.get(record.step - 1, 0.0) + record.overhead_ms
    live = switch.scope.probe.live if switch.scope.probe is not None else "unknown"
    return Run(watch.rows, plan, own, off, live)
