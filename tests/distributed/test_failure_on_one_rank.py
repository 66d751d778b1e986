"""Whatever fails on one rank: no rank hangs, the training goes on and stays the same, and rank 0 tells."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT, Job, environments, launch
from tests.faults.stages import STAGES
from tests.hooks.runs import HAS_LIGER_LOSS, notes_of, steps_of

# What only several processes have, or what ends in the exchange itself.
MEETING = {
    "gather": "driftscope.hooks.headpass:Heads.gather",
    "param_norm local": "driftscope.hooks.deep:DeepWindow.local",
    "pack": "driftscope.hooks.together:pack_blocks",
    "agree": "driftscope.hooks.together:Together.agree",
    "exchange": "driftscope.hooks.ranks:Ranks.exchange",
    "merged": "driftscope.hooks.together:Together.merged",
    "begin_step": "driftscope.hooks.scope:measured_micro_steps",
    "finish_step": "driftscope.hooks.scope:Scope.finish_step",
    "connect": "driftscope.hooks.ranks:_group",
}
NOT_ON_RANK_1 = {
    # rank 0 does these for all
    "console", "drift", "rules", "records", "journal", "metrics", "report", "run_info spec", "capsule save", "merged",
    "profile", "capsule", "capsule begin", "run_info", "param_norm close",
}  # fmt: skip
ALONE = {"attach", "agree", "exchange", "begin_step", "finish_step", "connect"}
"""Failures after which the ranks go on without each other's figures."""


def run(tmp_path: Path, places: dict[str, str], timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """What each rank printed, by label."""
    job = Job(directory=str(tmp_path), mode="ddp")
    command = [sys.executable, "-m", "tests.distributed.each_stage", str(tmp_path), json.dumps(places)]
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    tmp_path.mkdir(exist_ok=True)
    started = []
    try:
        for log, environment in zip(logs, environments(job, 2), strict=True):
            environment["DRIFTSCOPE_RANKS_TIMEOUT"] = "20"
            with log.open("wb") as errors:
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors)
                )
        deadline = time.monotonic() + timeout_s
        out: dict[str, list[dict[str, Any]]] = {}
        for process, log in zip(started, logs, strict=True):
            text, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            assert process.returncode == 0, log.read_text(errors="replace")[-3000:]
            for line in text.decode().splitlines():
                if line.startswith('{"label"'):
                    told = json.loads(line)
                    out.setdefault(told["label"], []).append(told)
        return out
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss")
def test_a_live_liger_is_not_judged_without_the_other_ranks_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its divisor is a mean over ranks: alone, a rank would take it for a difference that nothing explains."""
    monkeypatch.setenv("DRIFTSCOPE_RANKS_TIMEOUT", "10")
    done = launch(tmp_path, "ddp", liger=True, log_ratio=0.3, fail="driftscope.hooks.ranks:_group@1")
    assert [r["steps"] for r in done.ranks] == [2, 2]
    for record in done.records:
        assert "token counts" in record.unavailable["head"]
        assert "could not be reached" in record.unavailable["ranks"]
        assert record.causes == []
    assert not {a.rule for a in done.alerts} & {"DS101", "DS103", "DS109"}


def halves() -> list[dict[str, str]]:
    places = {k: v for k, v in (STAGES | MEETING).items() if k not in NOT_ON_RANK_1}
    names = sorted(places)
    return [{k: places[k] for k in names[i::2]} for i in range(2)]


@pytest.mark.parametrize("part", [0, 1])
def test_no_failure_on_one_rank_hangs_or_ends_the_run(tmp_path: Path, part: int) -> None:
    places = halves()[part]
    found = run(tmp_path, places, timeout_s=400)
    assert found.keys() == places.keys()
    usual = sorted(told["seconds"] for ranks in found.values() for told in ranks)
    weights = {round(told["weights"], 6) for ranks in found.values() for told in ranks}
    assert len(weights) == 1, "a failure of Driftscope has changed the training"
    for number, label in enumerate(places):
        for told in found[label]:
            assert told["steps"] == 2, told
            if label != "connect":  # there the others wait for the time-out, once
                assert told["seconds"] < usual[len(usual) // 2] * 4 + 5, (told, usual)
        rank1 = next(told for told in found[label] if told["rank"] == 1)
        assert rank1["calls"], f"{label}: the broken function was never called"
        assert rank1["off"], f"{label}: nothing is off on rank 1"
        records = steps_of(tmp_path / str(number) / "run")
        assert {r.step for r in records} == {1, 2}
        assert all(r.residual is None or r.residual < 1e-5 for r in records)
        notes = notes_of(tmp_path / str(number) / "run")
        if label in ALONE:
            assert any(n.stage == "ranks" for n in notes), (label, notes)
            assert any("ranks" in r.unavailable for r in records), label
        else:
            assert any(n.rank == 1 and "rank 1" in n.message for n in notes), (label, notes)
            assert all("ranks" not in r.unavailable for r in records), label
