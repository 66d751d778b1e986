"""Where an analysed step's time goes: host time, device time, launches and synchronisations, by Driftscope stage.

Two looks at the same step. *Timed*: a stage begins and ends with the device idle, no profiler; its wall time is what
it costs when nothing overlaps. *Traced*: torch.profiler over one step; launches and waits are exact, host times are
inflated by the profiler. All figures are a stage's own, without those of the stages inside it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from interleaved import Switch
from torch.profiler import ProfilerActivity, profile, record_function
from training import now
from transformers import TrainerCallback

PREFIX = "driftscope/"
REST = "(the step itself)"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
FINER = (  # what is looked at apart inside of the guard's stages, where this version has it
    "driftscope.hooks.headpass:measure_transform",
    "driftscope.hooks.headpass:measure",
    "driftscope.hooks.headpass:Heads._agrees",
    "driftscope.hooks.headpass:Heads._batches",
    "driftscope.hooks.headpass:fused_linear_logprobs",
    "driftscope.hooks.recorder:Recorder.write",
    "driftscope.hooks.recorder:Recorder._judge",
    "driftscope.hooks.recorder:Recorder._journal",
)


@dataclass
class Stage:
    """A stage's own figures over one step; ``kernels``: device ms and count by kernel name."""

    calls: int = 0
    host_ms: float = 0.0
    device_ms: float = 0.0
    launches: int = 0
    waits: int = 0
    wait_ms: float = 0.0
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)


def by_stage(events: list[dict[str, Any]], prefix: str = PREFIX) -> dict[str, Stage]:
    """Figures by stage from the events of a Chrome trace.

    A launch or a wait belongs to the innermost stage that is open when it begins, on whatever thread (the backward
    runs on threads of its own while the stage waits for it); what no stage covers is the step itself.
    """
    spans = sorted(
        ((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(prefix)) for e in events
         if e.get("cat") == "user_annotation" and e.get("name", "").startswith(prefix)),
        key=lambda span: (span[0], -span[1]),
    )  # fmt: skip
    out: dict[str, Stage] = defaultdict(Stage)
    own: dict[int, float] = {i: span[1] - span[0] for i, span in enumerate(spans)}
    for i, outer in enumerate(innermost(spans, [(start, end) for start, end, _ in spans])):
        if outer is not None:
            own[outer] -= spans[i][1] - spans[i][0]
        out[spans[i][2]].calls += 1
    for i, ms in own.items():
        out[spans[i][2]].host_ms += ms / 1e3
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    done = (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    device = {e["args"]["correlation"]: e for e in done if "correlation" in e.get("args", {})}
    places = innermost(spans, [(e["ts"], e["ts"]) for e in runtime])
    for event, place in zip(runtime, places, strict=True):
        _count(out[spans[place][2] if place is not None else REST], event, device)
    return dict(out)


def _count(stage: Stage, event: dict[str, Any], device: dict[Any, dict[str, Any]]) -> None:
    name = event["name"]
    if name.startswith(LAUNCHES):
        stage.launches += 1
    elif name.startswith(WAITS):
        stage.waits += 1
        stage.wait_ms += event["dur"] / 1e3
    done = device.get(event.get("args", {}).get("correlation"))
    if done is not None:
        ms = done["dur"] / 1e3
        stage.device_ms += ms
        before = stage.kernels.get(done["name"], (0.0, 0))
        stage.kernels[done["name"]] = (before[0] + ms, before[1] + 1)


def innermost(spans: list[tuple[float, float, str]], asked: list[tuple[float, float]]) -> list[int | None]:
    """For each asked interval the index of the shortest span that holds it and is not itself; spans are sorted."""
    order = sorted(range(len(asked)), key=lambda i: (asked[i][0], -asked[i][1]))
    out: list[int | None] = [None] * len(asked)
    opened: list[int] = []
    following = 0
    for i in order:
        start, end = asked[i]
        while following < len(spans) and spans[following][0] <= start:
            opened.append(following)
            following += 1
        while opened and spans[opened[-1]][1] < start:
            opened.pop()
        holding = [k for k in opened if spans[k][1] >= end and (spans[k][:2] != (start, end) or k < i)]
        out[i] = holding[-1] if holding else None
    return out


class Timer:
    """Wall time of nested stages with the device idle at both ends, each without what is inside it."""

    def __init__(self) -> None:
        self.ms: Counter[str] = Counter()
        self._inside: list[float] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = (now() - begun) * 1e3
            self.ms[name] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took


@contextlib.contextmanager
def marked(scope: Any, around: Callable[[str], Any]) -> Iterator[list[str]]:
    """Run every guarded stage, and what FINER names, inside of ``around(name)``; yields what was not found."""
    missing, undo = [], []
    guard_run = scope.guard.run

    def run(stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around(stage):
            return guard_run(stage, function, *args, **kwargs)

    scope.guard.run = run
    for place in FINER:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        try:
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            original = getattr(owner, name)
        except (ImportError, AttributeError):
            missing.append(place)
            continue
        undo.append((owner, name, original))
        setattr(owner, name, _wrapped(original, f". {path}", around))
    try:
        yield missing
    finally:
        del scope.guard.run
        for owner, name, original in undo:
            setattr(owner, name, original)


def _wrapped(original: Callable[..., Any], name: str, around: Callable[[str], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with around(name):
            return original(*args, **kwargs)

    return call


class Sequence(TrainerCallback):
    """What happens at which step: asleep, awake, timed stages, one traced step."""

    def __init__(self, switch: Switch, steps: int) -> None:
        self.switch, self.steps = switch, steps
        self.timer, self.timed = Timer(), []
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.events: list[dict[str, Any]] = []
        self.missing: list[str] = []
        self._kind, self._begun = "", 0.0
        self._stack = contextlib.ExitStack()
        self._profiler: Any = None

    def kind(self, index: int) -> str:
        """Two asleep and two awake to warm up; then asleep, awake and timed in turn; at the end the traced one."""
        if index < 4:
            return "warm asleep" if index < 2 else "warm awake"
        if index == self.steps - 2:
            return "traced"
        if index == self.steps - 1:
            return "end"
        return ("asleep", "awake", "timed")[(index - 4) % 3]

    def on_step_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        at = now()
        if self._kind:
            self.ms[self._kind].append((at - self._begun) * 1e3)
        self._close()
        self._kind = self.kind(state.global_step)
        self.switch.turn("asleep" not in self._kind)
        if self._kind == "timed":
            self.timer = Timer()
            self._stack.enter_context(marked(self.switch.scope, self.timer.stage))
        elif self._kind == "traced":
            self.missing = self._stack.enter_context(marked(self.switch.scope, _range))
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.__enter__()
        self._begun = now()

    def _close(self) -> None:
        if self._kind == "timed":
            self.timed.append(dict(self.timer.ms))
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                self.events = json.loads(path.read_text(errors="replace"))["traceEvents"]
            self._profiler = None
        self._stack.close()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._close()
        self.switch.turn(True)


def _range(name: str) -> Any:
    return record_function(PREFIX + name)


def profiled(trainer: Any, run_dir: Path, tier: str, rounds: int) -> dict[str, Any]:
    """Train a few steps and give the figures of one analysed step by stage."""
    switch = Switch(trainer, run_dir, tier)
    trainer.args.max_steps = 4 + 3 * rounds + 2
    sequence = Sequence(switch, trainer.args.max_steps)
    trainer.callback_handler.callbacks.insert(0, sequence)
    try:
        trainer.train()
    finally:
        trainer.callback_handler.callbacks.remove(sequence)
        off = switch.close()
    traced = by_stage(sequence.events)
    names = sorted({*traced, *(n for timed in sequence.timed for n in timed)} - {REST})
    rows = {
        name: {
            "timed_ms": statistics.median(timed.get(name, 0.0) for timed in sequence.timed),
            **_figures(traced.get(name, Stage())),
        }
        for name in names
    }
    return {
        "tier": tier,
        "median_step_ms": {kind: statistics.median(ms) for kind, ms in sequence.ms.items()},
        "stages": dict(sorted(rows.items(), key=lambda row: -row[1]["timed_ms"])),
        "step_itself": _figures(traced.get(REST, Stage())),
        "not_found": sequence.missing,
        "off": off,
    }


def _figures(stage: Stage) -> dict[str, Any]:
    top = sorted(stage.kernels.items(), key=lambda kernel: -kernel[1][0])[:4]
    return {
        "calls": stage.calls,
        "host_ms": stage.host_ms,
        "device_ms": stage.device_ms,
        "launches": stage.launches,
        "waits": stage.waits,
        "wait_ms": stage.wait_ms,
        "kernels": {name[:90]: {"ms": ms, "count": count} for name, (ms, count) in top},
    }


def table(found: dict[str, Any]) -> str:
    """The stages as text, one a line, the most costly first."""
    stages = found["stages"]
    columns = ("calls", "timed_ms", "host_ms", "device_ms", "launches", "waits", "wait_ms")
    total = {column: sum(row[column] for row in stages.values()) for column in columns}
    rows = {**stages, "all stages": total, REST: {"timed_ms": 0.0, **found["step_itself"]}}
    lines = ["; ".join(f"{kind} {ms:.1f} ms" for kind, ms in found["median_step_ms"].items())]
    lines.append(f"{'a stage without those inside it':34}" + "".join(f"{column:>10}" for column in columns))
    for name, row in rows.items():
        cells = (f"{row[c]:10.2f}" if c.endswith("_ms") else f"{row[c]:10d}" for c in columns)
        lines.append(f"{name:34}" + "".join(cells))
    return "\n".join(lines)
