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
