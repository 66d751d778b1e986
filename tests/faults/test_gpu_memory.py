"""A GPU whose memory really runs out inside a stage: tried again smaller, then off; the run ends as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from driftscope.hooks import deep, headpass
from driftscope.hooks.scope import attach
from tests.hooks.runs import even_lengths, notes_of, steps_of, trainer

pytestmark = [
    pytest.mark.gpu,
    # torch says once a process that one of its attention kernels may choose another order; the run below chooses none.
    pytest.mark.filterwarnings("ignore:cuDNN Attention defaults to a non-deterministic:UserWarning"),
]
VOCABULARY = 32768
TRAINED: dict[str, Any] = {
    "model_config": {"vocab": VOCABULARY, "attention_dropout": 0.2},
    "use_cpu": False,
    "bf16": True,
    "max_steps": 4,
    "max_completion_length": 128,
    # A ratio over 128 tokens in bfloat16 may mask every sequence of a micro-batch, and leave no gradient to measure.
    "vllm_importance_sampling_correction": False,
}
TILE_BYTES = 512 * VOCABULARY * 4 * 4  # all 4 x 128 tokens of a micro-batch in one tile


@contextmanager
def only(free_bytes: int) -> Iterator[None]:
    """Inside, torch may take no more than that from the device beyond what is in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels whose results do not depend on the run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(directory: Any, *, watched: bool = True, **settings: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Weights after the run, and its scope."""
    with trainer(directory, **TRAINED) as made:
        even_lengths(made)
        options = {"spectrum_every": 1, "deep_every": 0, "console": False, "report": False, "capsules": 0, **settings}
        scope = attach(made, directory / "run", **options) if watched else None
        made.train()
        assert made.state.global_step == TRAINED["max_steps"]
        if scope is not None:
            scope.detach()
        return {n: v.detach().cpu().clone() for n, v in made.model.state_dict().items()}, scope


def peak_of(call: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes that a call needs beyond what was in use."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(*args, **kwargs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_head_pass_is_measured_in_half_the_memory(tmp_path: Any, monkeypatch: Any, exact: None) -> None:
    monkeypatch.setattr(headpass.Heads, "_agrees", lambda *_: False)  # through the tiles, whose size is the workspace
    plain, _ = train(tmp_path / "plain", watched=False)
    measure, need, tried = headpass.measure, [], []

    def limited(*args: Any, rows: int, **kwargs: Any) -> Any:
        if not need:
            need.append(peak_of(measure, *args, rows=rows, **kwargs))
        tried.append(rows)
        with only(int(0.75 * need[0])):
            return measure(*args, rows=rows, **kwargs)

    monkeypatch.setattr(headpass, "measure", limited)
    weights, scope = train(tmp_path / "watched", workspace_bytes=TILE_BYTES)
    print(f"head pass: {need[0] / 2**20:.0f} MiB at {tried[0]} rows; tried {tried}, retried {scope.guard.retried}")
    assert scope.guard.off == {}
    assert scope.guard.retried["head"] >= 1
    assert tried[1] == tried[0] // 2
    records = steps_of(tmp_path / "watched" / "run")
    assert len(records) == 8
    found = [(r.step, r.micro_step, r.residual, r.unavailable) for r in records]
    assert all(residual is not None and residual < 2e-2 for _, _, residual, _ in found), found
    assert all(torch.equal(v, weights[n]) for n, v in plain.items())


@pytest.mark.parametrize("stage", ["head", "param_norm"])
def test_a_stage_without_memory_is_switched_off(tmp_path: Any, stage: str, monkeypatch: Any, exact: None) -> None:
    plain, _ = train(tmp_path / "plain", watched=False)
    owner, name = {"head": (headpass, "measure"), "param_norm": (deep, "add_micro_batch")}[stage]
    original, after, calls = getattr(owner, name), [], []

    def starved(*args: Any, **kwargs: Any) -> Any:
        calls.append(torch.cuda.memory_allocated())
        with only(2**20):
            large = torch.empty(
                2**27, dtype=torch.uint8, device="cuda"
            )  # 128 MiB of the stage's own, and none is left
            return original(*args, **kwargs), large

    def look(*_: Any) -> None:
        after.append(torch.cuda.memory_allocated())

    monkeypatch.setattr(owner, name, starved)
    monkeypatch.setattr("driftscope.hooks.recorder.Recorder.note", _and(look))
    weights, scope = train(tmp_path / "watched", deep_every=1 if stage == "param_norm" else 0)
    assert "out of memory" in scope.guard.off[stage].lower()
    assert scope.guard.retried == {stage: 1}
    assert len(calls) == 2  # never again
    print(f"{stage}: {calls[0]} bytes in use before, {after[0]} once it was off")
    assert after[0] <= calls[0] + 2**20  # nothing of the stage is kept
    (note,) = notes_of(tmp_path / "watched" / "run")
    assert note.stage == stage
    assert len(steps_of(tmp_path / "watched" / "run")) == 8
    assert all(torch.equal(v, weights[n]) for n, v in plain.items())


def _and(look: Any) -> Any:
    """``Recorder.note`` with a look at the memory."""
    from driftscope.hooks.recorder import Recorder

    note = Recorder.note

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        look()
        note(self, *args, **kwargs)

    return noted
