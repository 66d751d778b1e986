"""Ranks that are not alike: the straggler, the one that disagrees, the divisor of each its own; and a common end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT, Job, environments
from tests.hooks.runs import alerts_of, steps_of

RANK_RULES = {"DS501", "DS502", "DS503"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """The directory of all variants, and what each rank printed of each."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.distributed.one_rank_off", str(directory)]
    logs = [directory / f"log{rank}" for rank in range(2)]
    started = []
    try:
        for log, environment in zip(logs, environments(Job(directory=str(directory), mode="ddp"), 2), strict=True):
            with log.open("wb") as errors:
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors)
                )
        told = []
        for process, log in zip(started, logs, strict=True):
            text, _ = process.communicate(timeout=300)
            assert process.returncode == 0, log.read_text(errors="replace")[-3000:]
            told += [json.loads(line) for line in text.decode().splitlines() if line.startswith('{"name"')]
        yield directory, told
    finally:
        for process in started:
            process.kill()
            process.wait()


def found(directory: Path, name: str) -> dict[str, Any]:
    return {a.rule: a for a in alerts_of(directory / name / "run") if a.rule in RANK_RULES}


def test_no_stage_is_off(runs: Any) -> None:
    assert [told["off"] for told in runs[1]] == [{}] * len(runs[1])


def test_ranks_that_are_alike_are_no_finding(runs: Any) -> None:
    assert found(runs[0], "honest") == {}


def test_an_engine_that_is_off_on_one_rank(runs: Any) -> None:
    alerts = found(runs[0], "ratio")
    assert alerts.keys() == {"DS502"}
    assert "is_ratio_mean" in alerts["DS502"].evidence
    rows = steps_of(runs[0] / "ratio" / "run")[0].ranks.rows
    assert rows[1].is_ratio_mean / rows[0].is_ratio_mean == pytest.approx(0.5, rel=0.1)


def test_a_divisor_that_is_wrong_on_several_ranks_only(runs: Any) -> None:
    alerts = found(runs[0], "normalizer")
    assert alerts.keys() == {"DS503"}
    record = steps_of(runs[0] / "normalizer" / "run")[0]
    rows = record.ranks.rows
    assert rows[0].tokens != rows[1].tokens
    for row in rows:  # each divides by its own tokens; the configured loss by the mean of both
        assert row.normalizer_measured == pytest.approx(row.tokens, rel=1e-4)
    assert record.paths["oracle"].normalizer == pytest.approx(sum(row.tokens for row in rows), rel=1e-6)


def test_a_slow_rank(runs: Any) -> None:
    alerts = found(runs[0], "slow")
    assert alerts.keys() == {"DS501"}
    assert "Rank 1" in alerts["DS501"].title
    last = steps_of(runs[0] / "slow" / "run")[-1].ranks
    assert last.slowest == 1
    assert last.slowest_ms >= 50.0


def test_all_ranks_stop_at_the_same_step(runs: Any) -> None:
    ends = [told["steps"] for told in runs[1] if told["name"] == "stop"]
    assert ends == [2, 2]  # critical at step 1; told with the figures of step 2
    assert any(a.severity == "critical" for a in alerts_of(runs[0] / "stop" / "run"))


def test_each_rank_keeps_its_own_records_where_asked(runs: Any) -> None:
    whole = steps_of(runs[0] / "honest" / "run")
    parts = [steps_of(runs[0] / "honest" / "run" / "ranks" / f"rank{rank}") for rank in range(2)]
    assert [[r.step for r in part] for part in parts] == [[1, 2], [1, 2]]
    assert [r.rank for part in parts for r in part] == [0, 0, 1, 1]
    for i, record in enumerate(whole):
        assert record.tokens == parts[0][i].tokens + parts[1][i].tokens
    assert not (runs[0] / "ratio" / "run" / "ranks").exists()
