"""The examples run as they stand, and leave records."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from driftscope.journal import read_run
from tests.hooks.runs import reset_accelerate

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["attach_grpo.py", "callback_only.py"])
def test_an_example_runs_and_leaves_clean_records(name, tmp_path, capsys):
    reset_accelerate()
    runpy.run_path(str(EXAMPLES / name))["main"](str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert {step.step for step in run.steps} == {1, 2, 3}
    assert not [alert for alert in run.alerts if alert.severity != "info"]


def test_two_runs_are_trained_and_compared(tmp_path, capsys):
    reset_accelerate()
    comparison = runpy.run_path(str(EXAMPLES / "compare_runs.py"))["main"](str(tmp_path))
    assert [run.label for run in comparison.runs] == ["group", "none"]
    assert [row.name for row in comparison.settings] == ["scale_rewards"]
    assert {run.level for run in comparison.runs} == {"clean"}
    assert comparison.headline in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "comparison.html").stat().st_size > 1_000_000
