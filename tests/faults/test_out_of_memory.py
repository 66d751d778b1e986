"""Out of memory inside a stage: let go of what it held, try again smaller, then switch it off; the run goes on."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from driftscope.config import DriftscopeConfig
from driftscope.hooks import headpass
from driftscope.hooks.guard import RETRIED, Guard, is_out_of_memory
from driftscope.hooks.scope import attach
from driftscope.hooks.workspace import LEAST_ROWS, halve
from driftscope.spectrum import tile_rows
from tests.faults.stages import STAGES, break_it
from tests.hooks.runs import notes_of, steps_of, trainer


def exhausted() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")


class Stage:
    """A stage that holds a tensor in its frame when it runs out of memory."""

    def __init__(self, failures: int, error: Any = exhausted) -> None:
        self.failures, self.error = failures, error
        self.held: list[weakref.ref[Any]] = []
        self.alive_at_start: list[int] = []

    def __call__(self) -> str:
        gc.disable()  # what is let go must not depend on the collector's moment
        try:
            self.alive_at_start.append(sum(ref() is not None for ref in self.held))
            large = torch.zeros(1000)
            self.held.append(weakref.ref(large))
            self._inner(large)
            return "done"
        finally:
            gc.enable()

    def _inner(self, large: torch.Tensor) -> None:
        twice = large * 2
        self.held.append(weakref.ref(twice))
        if self.failures > 0:
            self.failures -= 1
            try:
                raise self.error()
            except BaseException as error:
                cause = ValueError("while it was handled")
                raise error from cause


def test_what_the_first_try_held_is_gone_before_the_second() -> None:
    guard = Guard(lambda *_: None)
    stage = Stage(1)
    assert guard.run("head", stage) == "done"
    assert stage.alive_at_start == [0, 0]
    assert guard.retried == {"head": 1}
    assert guard.off == {}


def test_a_second_failure_switches_the_stage_off() -> None:
    told: list[tuple[str, str]] = []
    guard = Guard(lambda *words: told.append(words))
    stage = Stage(2)
    assert guard.run("head", stage) is None
    assert all(ref() is None for ref in stage.held)
    assert guard.run("head", stage) is None
    assert len(stage.alive_at_start) == 2
    assert told == [("head", "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB")]


def test_a_stage_that_may_not_run_twice_is_switched_off_at_once() -> None:
    assert "record" not in RETRIED
    guard = Guard(lambda *_: None)
    stage = Stage(1)
    assert guard.run("record", stage) is None
    assert stage.alive_at_start == [0]
    assert all(ref() is None for ref in stage.held)
    assert set(guard.off) == {"record"}


def test_it_is_retried_as_long_as_the_workspace_can_shrink() -> None:
    guard = Guard(lambda *_: None)
    left, freed = [2], []
    guard.shrink = lambda: (left.__setitem__(0, left[0] - 1), left[0] >= 0)[1]  # type: ignore[func-returns-value]
    guard.let_go = lambda: freed.append(1)
    for _ in range(2):
        assert guard.run("head", Stage(1)) == "done"
    assert guard.run("head", Stage(1)) is None
    assert guard.retried == {"head": 2}
    assert len(freed) == 3
    assert set(guard.off) == {"head"}


def test_a_broken_remedy_is_no_second_fault() -> None:
    def broken() -> bool:
        raise RuntimeError("broken on purpose")

    guard = Guard(lambda *_: None)
    guard.shrink, guard.let_go = broken, broken  # type: ignore[assignment]
    assert guard.run("head", Stage(1)) is None
    assert "OutOfMemoryError" in guard.off["head"]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, found: bool) -> None:
    assert is_out_of_memory(error) is found


def test_the_workspace_is_halved_down_to_a_few_rows(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        heads = headpass.Heads(made, made.model, DriftscopeConfig(workspace_bytes=2**20))
        rows = [heads.rows()]
        while halve(heads):
            rows.append(heads.rows())
        assert rows == [128, 64, 32, 16, 8]
        assert rows[-1] == LEAST_ROWS
        assert tile_rows(512, heads.config.workspace_bytes) == heads.rows()


def test_a_head_pass_that_fits_when_it_is_smaller_is_measured(tmp_path: Any, monkeypatch: Any) -> None:
    """The real pass, with a device that holds 40 rows at once: measured, and nothing is switched off."""
    monkeypatch.setattr(headpass.Heads, "_agrees", lambda *_: False)  # through the tiles, not the fused way
    measure, refused = headpass.measure, []

    def limited(*args: Any, rows: int, **kwargs: Any) -> Any:
        if rows > 40:
            refused.append(rows)
            raise exhausted()
        return measure(*args, rows=rows, **kwargs)

    monkeypatch.setattr(headpass, "measure", limited)
    with trainer(tmp_path, max_steps=4) as made:
        with attach(made, tmp_path / "run", spectrum_every=1, workspace_bytes=2**19, console=False) as scope:
            made.train()
        assert scope.guard.off == {}
        assert scope.guard.retried == {"head": 1}
        assert scope.config.workspace_bytes == 2**19
    assert refused == [64]  # once: the smaller workspace is kept
    records = steps_of(tmp_path / "run")
    assert len(records) == 8
    assert all(r.residual is not None and r.residual < 1e-5 for r in records)
    assert notes_of(tmp_path / "run") == []


MEMORY_STAGES = sorted(
    {label for label in STAGES if label.partition(" ")[0] in RETRIED}
    | {"liger", "canary", "kept_mass", "attribution", "capsule", "capture forward", "capture output", "is_ratio"}
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> dict[str, torch.Tensor]:
    """Weights after three steps without Driftscope, dropout on."""
    with trainer(tmp_path_factory.mktemp("plain"), **TRAINED) as made:
        made.train()
        return {n: v.clone() for n, v in made.model.state_dict().items()}


TRAINED: dict[str, Any] = {"max_steps": 3, "top_p": 0.8, "model_config": {"attention_dropout": 0.2}}


@pytest.mark.parametrize("label", MEMORY_STAGES)
def test_a_run_whose_stage_runs_out_of_memory(tmp_path: Any, label: str, monkeypatch: Any, plain: Any) -> None:
    calls = break_it(monkeypatch, STAGES[label], exhausted())
    with trainer(tmp_path, **TRAINED) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False)
        made.train()
        after = {n: v.clone() for n, v in made.model.state_dict().items()}
        assert calls
        stage = label.partition(" ")[0]
        assert "out of memory" in scope.guard.off[stage]
        assert scope.guard.retried.get(stage, 0) == (stage in RETRIED)
        scope.detach()
    assert all(torch.equal(v, after[n]) for n, v in plain.items())
    notes = [n for n in notes_of(tmp_path / "run") if n.stage == stage]
    assert len(notes) == 1
    assert any(stage in r.unavailable for r in steps_of(tmp_path / "run")) or stage == "capture"


def test_a_model_can_be_copied_and_saved_while_it_is_watched(tmp_path: Any) -> None:
    """The hooks on it must not stand in the way, nor take the trainer along."""
    with trainer(tmp_path, max_steps=1) as made, attach(made, tmp_path / "run", spectrum_every=1, console=False):
        made.train()
        size = len(pickle.dumps(made.model))
        assert size < 2 * sum(p.numel() * p.element_size() for p in made.model.parameters())
        copy.deepcopy(made.model)(input_ids=torch.zeros((1, 3), dtype=torch.long))
