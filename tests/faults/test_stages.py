"""The table of stages is complete, and what fails hurts nothing beside it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from driftscope.hooks.scope import attach
from tests.faults.stages import ELSEWHERE, STAGES, break_it
from tests.hooks.runs import notes_of, steps_of, trainer

ROOT = Path(__file__).resolve().parents[2]


def guarded_stages() -> set[str]:
    """The first argument of every call of ``run`` and ``fail`` of a guard, in the sources."""
    found = set()
    for path in sorted((ROOT / "hooks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = ast.unparse(node.func)
                if called == "run" or called.endswith(("guard.run", "guard.fail")):
                    found.add(str(node.args[0].value))
    return found


def test_every_stage_is_in_the_table() -> None:
    stages = guarded_stages()
    assert len(stages) > 20
    assert stages <= {label.partition(" ")[0] for label in STAGES} | ELSEWHERE


@pytest.mark.parametrize("label", STAGES)
def test_the_weights_are_those_of_a_run_without_driftscope(
    tmp_path: Any, label: str, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    plain = request.getfixturevalue("plain_weights")
    with trainer(tmp_path, max_steps=2, top_p=0.8, model_config={"attention_dropout": 0.2}) as made:
        break_it(monkeypatch, STAGES[label])
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False)
        made.train()
        scope.detach()
        after = {n: v.clone() for n, v in made.model.state_dict().items()}
    assert plain.keys() == after.keys()
    assert all(torch.equal(v, after[n]) for n, v in plain.items())


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory: Any) -> dict[str, torch.Tensor]:
    """Weights after two steps without Driftscope, dropout on."""
    directory = tmp_path_factory.mktemp("plain")
    with trainer(directory, max_steps=2, top_p=0.8, model_config={"attention_dropout": 0.2}) as made:
        made.train()
        return {n: v.clone() for n, v in made.model.state_dict().items()}


def test_a_console_that_cannot_print_costs_no_note(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, "driftscope.dashboards.console:ConsoleReporter.note")
    break_it(monkeypatch, STAGES["head"])
    with trainer(tmp_path) as made, attach(made, tmp_path / "run", spectrum_every=1) as scope:
        made.train()
        assert "tell" in scope.guard.off
    assert [n.stage for n in notes_of(tmp_path / "run")] == ["head"]


def test_a_loss_without_a_graph(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own error goes on, whatever the explanation does."""
    calls = break_it(monkeypatch, "driftscope.hooks.doctor.explain:explain")
    with trainer(tmp_path, max_steps=1) as made:
        for parameter in made.model.parameters():
            parameter.requires_grad_(False)
        with (
            attach(made, tmp_path / "run", spectrum_every=1, console=False) as scope,
            pytest.raises(RuntimeError, match="does not require grad"),
        ):
            made.train()
        assert calls
        assert "broken on purpose" in scope.guard.off["gradient_flow"]


def test_the_clipped_norm_stays_on_record_without_the_gradient_stage(tmp_path: Any, monkeypatch: Any) -> None:
    break_it(monkeypatch, STAGES["param_norm"])
    with trainer(tmp_path, max_steps=3) as made:
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False):
            made.train()
        logged = [entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry]
    found = [r.live_grad_norm for r in steps_of(tmp_path / "run") if r.micro_step == 1]
    assert found == pytest.approx(logged, rel=1e-6)
