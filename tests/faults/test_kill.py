"""kill -9 at any moment of writing: at most the line that is being written is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from driftscope.errors import RecordError
from driftscope.journal import read_run
from tests.faults.processes import started

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")


@dataclass
class Found:
    """What was counted over all kills."""

    kills: int = 0
    with_records: int = 0
    torn: int = 0
    steps: list[int] = field(default_factory=list)


def look(directory: Path, reported: int, found: Found) -> None:
    """Check one killed run."""
    found.kills += 1
    path = directory / "records.jsonl"
    raw = path.read_bytes() if path.exists() else b""
    lines = raw.split(b"\n")
    found.torn += lines[-1] != b""
    for line in lines[:-1]:
        json.loads(line)
    info = directory / "run.json"
    if info.exists():  # the old one or the new one, never a part
        data = json.loads(info.read_text())
        assert data["run_id"] == "killed"
    if not raw:
        assert reported == 0
        return
    if b"\n" not in raw:
        assert reported == 0
        with pytest.raises(RecordError, match="no complete record"):
            read_run(directory)
        return
    run = read_run(directory)
    found.with_records += 1
    on_record = [(r.step, r.micro_step) for r in run.steps]
    assert on_record == [(s, m) for s in range(1, on_record[-1][0] + 1) for m in range(2)][: len(on_record)]
    assert len(on_record) >= 2 * reported  # whatever write() had returned from is there
    assert len(on_record) == len(lines) - 1
    found.steps.append(reported)


def wait_for_bytes(path: Path) -> None:
    """Until the writer has begun to write its records."""
    until = time.monotonic() + 30
    while not path.exists() or path.stat().st_size == 0:
        assert time.monotonic() < until, f"nothing is written to {path}"
        time.sleep(0.001)


@pytest.mark.parametrize(("kills", "payload"), [(60, 0), (20, 1 << 20), (20, -(8 << 20))])
def test_a_writer_killed_at_any_moment(tmp_path: Any, kills: int, payload: int, record_property: Any) -> None:
    moments = random.Random(payload)
    found = Found()
    with started("tests.faults.writers", "zygote", tmp_path) as zygote:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        for number in range(kills):
            zygote.stdin.write(f"{number} {payload} 0\n")
            zygote.stdin.flush()
            pid = int(zygote.stdout.readline())
            if number % 5:  # every fifth one is killed while it begins
                wait_for_bytes(tmp_path / str(number) / "records.jsonl")
            time.sleep(moments.uniform(0.0, 0.06))
            os.kill(pid, signal.SIGKILL)
            reported, status = map(int, zygote.stdout.readline().split())
            assert status == -signal.SIGKILL
            look(tmp_path / str(number), reported, found)
    assert found.kills == kills
    assert found.with_records + found.torn >= kills // 2, "killed too early: nothing was tested"
    record_property(
        "kills", f"{found.with_records} with records, {found.torn} torn, up to {max(found.steps, default=0)} steps"
    )
    if payload < 0:
        assert found.torn, "no kill fell into a write: the torn line is not tested"


def test_a_killed_writer_goes_on_without_a_seam(tmp_path: Any) -> None:
    """Many lives of one run: each is killed, and goes on from a checkpoint some steps before its last record."""
    moments = random.Random(0)
    resumed_at, lives = 0, 0
    path = tmp_path / "0" / "records.jsonl"
    with started("tests.faults.writers", "zygote", tmp_path) as zygote:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        while lives < 60 and (lives < 10 or len(list(path.parent.glob("records.killed.after-step-*.jsonl"))) < 3):
            lives += 1
            zygote.stdin.write(f"0 2000 {resumed_at}\n")
            zygote.stdin.flush()
            pid = int(zygote.stdout.readline())
            wait_for_bytes(path)
            time.sleep(moments.uniform(0.02, 0.12))
            os.kill(pid, signal.SIGKILL)
            reported, _ = map(int, zygote.stdout.readline().split())
            resumed_at = max(resumed_at, reported - moments.randrange(4))
    run = read_run(tmp_path / "0")
    on_record = [(r.step, r.micro_step) for r in run.steps]
    assert on_record == [(s, m) for s in range(1, on_record[-1][0] + 1) for m in range(2)][: len(on_record)]
    assert on_record[-1][0] > 10
    assert run.notes == []
    assert [p for p in run.problems if "damaged" in p] == []
    aside = list(path.parent.glob("records.killed.after-step-*.jsonl"))
    assert len(aside) >= 3, "no life was resumed before its last record: this test tests nothing"
