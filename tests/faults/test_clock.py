"""A clock that jumps: records stay in order, durations stay durations, the report opens."""

from __future__ import annotations

import ast
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from driftscope.dashboards.report import render
from driftscope.hooks.scope import attach
from driftscope.journal import JournalWriter, read_run
from driftscope.verdict import judge
from tests.hooks.runs import trainer
from tests.record_factory import info, seed_step, step

ROOT = Path(__file__).resolve().parents[2]
HOUR = 3600.0


@pytest.mark.parametrize("jumps", [(-5 * HOUR, -HOUR), (5 * HOUR, 5 * HOUR), (300 * HOUR, -300 * HOUR)])
def test_a_run_in_which_the_clock_jumps(tmp_path: Any, jumps: tuple[float, float], monkeypatch: Any) -> None:
    real = time.time
    with trainer(tmp_path, max_steps=4) as made, attach(made, tmp_path / "run", spectrum_every=1) as scope:
        shift = [0.0]
        monkeypatch.setattr(time, "time", lambda: real() + shift[0])
        step_of = made.training_step

        def jumping(*args: Any, **kwargs: Any) -> Any:
            shift[0] = sum(jumps[: made.state.global_step])
            return step_of(*args, **kwargs)

        made.training_step = jumping
        made.train()
        assert scope.guard.off == {}
    run = read_run(tmp_path / "run")
    assert [(r.step, r.micro_step) for r in run.steps] == [(s, m) for s in range(1, 5) for m in range(2)]
    stamps = [r.time for r in run.steps]
    assert max(abs(b - a) for a, b in pairwise(stamps) if a and b) >= HOUR  # the jump was seen
    for record in run.steps:
        assert record.step_ms is not None
        assert 0.0 < record.step_ms < 60_000.0
        assert 0.0 < record.overhead_ms < 60_000.0
    assert run.info is not None
    assert run.info.status == "finished"
    assert "<html" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("stamp", [-1e12, -1.0, 0.0, 1e11, 1e18, 1e300])
def test_any_stamp_can_be_shown_and_judged(tmp_path: Any, stamp: float) -> None:
    with JournalWriter(tmp_path) as journal:
        journal.write_info(info(created=2e9, finished=stamp))
        journal.write(seed_step(1, time=stamp))
        journal.write(step(step=2, time=-stamp))
    assert judge(read_run(tmp_path)).level == "critical"
    assert render(tmp_path).exists()


def test_the_journal_waits_by_a_clock_that_does_not_jump(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    journal = JournalWriter(tmp_path)
    journal.write(step(step=1))
    (tmp_path / "records.jsonl").unlink()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1000 * HOUR)
    time.sleep(1.1)
    journal.write(step(step=2))
    journal.close()
    assert [r.step for r in read_run(tmp_path).steps] == [1, 2]


def test_the_wall_clock_is_read_for_stamps_only() -> None:
    """``time.time()`` is never subtracted: durations are measured by clocks that do not jump."""
    looked = 0
    for folder in ("driftscope", "hooks", "dashboards"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                    looked += 1
                    assert "time.time()" not in ast.unparse(node), f"{path}:{node.lineno}"
    assert looked > 100
