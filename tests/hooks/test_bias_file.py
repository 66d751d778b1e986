"""The bias over deep steps outlives the process: a run that goes on from a checkpoint goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from driftscope.hooks import bias_file
from driftscope.hooks.scope import Scope, attach
from driftscope.sketch import BiasTracker, SketchLayout
from tests.faults.stages import break_it
from tests.hooks.runs import notes_of, trainer

SETTINGS: dict[str, Any] = {"spectrum_every": 1, "deep_every": 1, "capsules": 0, "console": False, "report": False}


def train(directory: Path, last: int, *, resumed_at: int = 0, **settings: Any) -> tuple[Scope, list[torch.Tensor]]:
    """Train to a step, saved at every second one; the scope, and the bias it had in hand when the training began."""
    found: list[torch.Tensor] = []
    with trainer(directory, max_steps=last, save_strategy="steps", save_steps=2) as made:
        scope = attach(made, directory / "run", **SETTINGS, **settings)
        begin = scope.begin_step

        def look() -> None:
            if not found:
                bias = scope.probe.deep.bias if scope.probe is not None else None
                found.append(bias.state() if bias is not None else torch.zeros(0))
            begin()

        scope.begin_step = look  # type: ignore[method-assign]
        checkpoint = directory / "trainer" / f"checkpoint-{resumed_at}"
        made.train(resume_from_checkpoint=str(checkpoint) if resumed_at else None)
        scope.detach()
    return scope, found


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "run").glob("bias*"))


def test_a_resumed_run_goes_on_with_the_bias_of_its_checkpoint(tmp_path: Any) -> None:
    first, begun = train(tmp_path, 5)
    assert begun[0].numel() == 0
    assert first.probe.deep.bias.steps == 5
    assert kept(tmp_path) == ["bias.step-2.pt", "bias.step-4.pt"] or kept(tmp_path) == [
        "bias.step-4.pt",
        "bias.step-5.pt",
    ]
    saved = torch.load(tmp_path / "run" / "bias.step-4.pt", weights_only=True)["state"]
    assert saved[0] == 4
    second, begun = train(tmp_path, 8, resumed_at=4)
    assert torch.equal(begun[0], saved)
    assert second.probe.deep.bias.steps == 8
    assert second.guard.off == {}
    assert len(kept(tmp_path)) == bias_file.KEPT


def test_another_run_or_model_has_no_part_in_it(tmp_path: Path) -> None:
    layout = SketchLayout.of({"a.weight": 30, "b.weight": 7}, 16)
    bias = BiasTracker(layout)
    bias_file.save(tmp_path, "mine", 3, bias)
    assert torch.equal(bias_file.load(tmp_path, "mine", 3, layout).state(), bias.state())
    assert bias_file.load(tmp_path, "mine", 2, layout) is None
    assert bias_file.load(tmp_path, "another", 3, layout) is None
    assert bias_file.load(tmp_path, "mine", 3, SketchLayout.of({"a.weight": 30}, 16)) is None
    assert bias_file.load(tmp_path, "mine", 3, SketchLayout.of({"a.weight": 30, "b.weight": 7}, 32)) is None


@pytest.mark.parametrize(("place", "stage"), [("save", "bias"), ("load", "bias_load")])
def test_a_failure_costs_the_bias_alone(
    tmp_path: Any, place: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 2)
    calls = break_it(monkeypatch, f"driftscope.hooks.bias_file:{place}")
    scope, _ = train(tmp_path, 4, resumed_at=2)
    assert len(calls) == 1
    assert list(scope.guard.off) == [stage]
    assert [note.stage for note in notes_of(tmp_path / "run")] == [stage]
    assert ("bias.step-4.pt" in kept(tmp_path)) is (place == "load")


def test_a_damaged_file_is_told_and_left(tmp_path: Any) -> None:
    train(tmp_path, 2)
    (tmp_path / "run" / "bias.step-2.pt").write_bytes(b"damaged")
    scope, begun = train(tmp_path, 4, resumed_at=2)
    assert begun[0].numel() == 0
    assert scope.probe.deep.bias.steps == 2
    assert [note.stage for note in notes_of(tmp_path / "run")] == ["bias_load"]
