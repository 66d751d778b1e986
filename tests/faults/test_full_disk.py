"""A full disk: the run goes on, it is told once, what is kept stays readable, and recording begins again with room."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from driftscope._journal_backlog import Backlog
from driftscope.errors import RecordError
from driftscope.journal import MAX_TOLD, JournalWriter, open_journal, read_run
from driftscope.records import StepRecord
from tests.faults.disks import fill, small_disk
from tests.faults.processes import ROOT
from tests.record_factory import alert, info, step


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_full_disk_costs_nothing_where_it_is_emptied_in_time(tmp_path: Any) -> None:
    said: list[str] = []
    clock = Clock()
    with small_disk(tmp_path / "disk", "256k") as disk:
        journal = JournalWriter(disk / "run", told=said.append, clock=clock)
        journal.write_info(info())
        journal.write(step(step=1))
        ballast = fill(disk)
        for number in range(2, 30):  # the first ones fit into the file's last page
            journal.write(step(step=number))
        assert len(said) == 1
        assert "No space left on device" in said[0]
        assert "No space left on device" in str(journal.failed)
        raw = (disk / "run" / "records.jsonl").read_bytes()
        assert raw.endswith(b"\n")  # no half line, though the last write came to a half
        before = [r.step for r in read_run(disk / "run").steps]
        assert before == list(range(1, len(before) + 1))
        assert len(before) < 29
        ballast.unlink()
        journal.write(step(step=30))  # not yet: it waits between two tries
        assert [r.step for r in read_run(disk / "run").steps] == before
        clock.now = 1.5
        journal.write(step(step=31))
        journal.close()
        run = read_run(disk / "run")
        assert [r.step for r in run.steps] == list(range(1, 32))
        assert run.notes == []
        assert run.problems == []
        assert len(said) == 2
        assert "lost: nothing" in said[1]


def test_what_memory_does_not_hold_is_named_in_a_note(tmp_path: Any) -> None:
    said: list[str] = []
    clock = Clock()
    with small_disk(tmp_path / "disk", "256k") as disk:
        journal = JournalWriter(disk / "run", told=said.append, clock=clock)
        journal._backlog = Backlog(max_bytes=20_000)
        journal.write_info(info())
        journal.write(step(step=1))
        ballast = fill(disk)
        for number in range(2, 101):
            journal.write(step(step=number))
        ballast.unlink()
        clock.now = 1000.0
        journal.write(step(step=101))
        journal.write(step(step=102))
        journal.close()
        run = read_run(disk / "run")
        on_record = [r.step for r in run.steps]
        lost = sorted(set(range(1, 103)) - set(on_record))
        assert lost
        assert on_record == sorted(set(on_record))
        assert lost == list(range(lost[0], lost[-1] + 1))  # one gap
        (note,) = run.notes
        assert (note.stage, note.step) == ("journal", lost[0])
        assert f"{len(lost)} records of steps {lost[0]} to {lost[-1]} could not be written" in note.message
        assert f"{len(lost)} records" in said[-1]
        assert len(said) == 2


def test_the_run_json_is_old_or_new_on_a_full_disk(tmp_path: Any) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        journal = JournalWriter(disk / "run")
        journal.write_info(info(status="running"))
        journal.write(step(step=1))
        ballast = fill(disk)
        journal.write_info(info(status="finished", model={"text": "x" * 20_000}))
        assert json.loads((disk / "run" / "run.json").read_text())["status"] == "running"
        assert not list((disk / "run").glob(".run.json*"))
        ballast.unlink()
        journal.close()  # what could not be written is tried once more
        assert json.loads((disk / "run" / "run.json").read_text())["status"] == "finished"


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path: Any) -> None:
    said: list[str] = []
    clock = Clock()
    with small_disk(tmp_path / "disk", "64k") as disk:
        journal = open_journal(disk / "run", told=said.append).journal
        journal._clock = clock
        fill(disk)
        for number in range(1, 400):
            clock.now += 10.0
            journal.write(step(step=number))
            journal.write(alert(number=number))
        journal.close()
        assert len(said) == 2
        kept = (
            {(r.step) for r in read_run(disk / "run").steps}
            if (disk / "run" / "records.jsonl").stat().st_size
            else set()
        )
        assert f"of steps {len(kept) + 1} to 399 could not be written" in said[1]  # fmt: skip


def test_a_disk_that_is_full_at_the_start(tmp_path: Any) -> None:
    said: list[str] = []
    clock = Clock()
    with small_disk(tmp_path / "disk", "64k,nr_inodes=4") as disk:
        (disk / "run").mkdir()
        for name in ("a", "b"):
            (disk / name).write_text("x")  # no inode is left
        journal = open_journal(disk / "run", told=said.append).journal
        journal._clock = clock
        journal.write(step(step=1))
        for name in ("a", "b"):
            (disk / name).unlink()
        clock.now = 5.0
        journal.write(step(step=2))
        journal.close()
        assert [r.step for r in read_run(disk / "run").steps] == [1, 2]
        assert any("No space left" in words for words in said)


def test_a_device_that_is_always_full(tmp_path: Any) -> None:
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    clock = Clock()
    journal = JournalWriter(tmp_path, told=said.append, clock=clock)
    for number in range(1, 200):
        clock.now += 1.0
        journal.write(step(step=number))
    journal.close()
    assert len(said) == 2
    assert "No space left" in said[0]
    assert "199 records of steps 1 to 199" in said[1]


def test_trouble_that_comes_and_goes_is_told_a_bounded_number_of_times(tmp_path: Any) -> None:
    said: list[str] = []
    clock = Clock()
    full, path = tmp_path / "full", tmp_path / "records.jsonl"
    full.symlink_to("/dev/full")
    journal = JournalWriter(tmp_path, told=said.append, clock=clock)
    journal.write(step(step=1))
    for number in range(2, 100):
        clock.now += 100.0
        if number % 2:
            path.unlink()
        else:
            path.unlink(missing_ok=True)
            path.mkdir()
        journal.write(step(step=number))
        if path.is_dir():
            path.rmdir()
            path.touch()
    journal.close()
    assert len(said) == MAX_TOLD
    assert len(read_run(tmp_path).notes) <= 21


LIMITED = """
import resource, signal, sys
from pathlib import Path
from driftscope.journal import JournalWriter
from tests.record_factory import info, step
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
said = []
journal = JournalWriter(Path(sys.argv[1]), told=said.append)
journal.write_info(info())
for number in range(1, 51):
    journal.write(step(step=number))
journal.close()
print(len(said), said[0])
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs RLIMIT_FSIZE")
def test_a_file_that_may_not_grow_keeps_whole_lines(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("2 ")
    assert "File too large" in done.stdout
    raw = (tmp_path / "records.jsonl").read_bytes()
    assert raw.endswith(b"\n")
    assert len(raw) <= 10_000
    run = read_run(tmp_path)
    steps = [r.step for r in run.steps]
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    assert run.problems == []


def test_a_half_line_that_cannot_be_taken_back_does_not_join_the_next(tmp_path: Any, monkeypatch: Any) -> None:
    journal = JournalWriter(tmp_path, clock=(clock := Clock()))
    journal.write(step(step=1))
    write = os.write
    left = [1]

    def half(fd: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(PermissionError(1, "append only")))
    journal.write(step(step=2))
    monkeypatch.undo()
    assert not (tmp_path / "records.jsonl").read_bytes().endswith(b"\n")
    clock.now = 2.0
    journal.write(step(step=3))
    journal.close()
    run = read_run(tmp_path)
    assert [r.step for r in run.steps] == [1, 2, 3]
    assert any("1 damaged line skipped (line 2)" in p for p in run.problems)


def test_a_trainer_on_a_full_disk(tmp_path: Any, capsys: Any) -> None:
    from driftscope.hooks.scope import attach
    from tests.hooks.runs import trainer

    with small_disk(tmp_path / "disk", "12m") as disk, trainer(tmp_path, max_steps=4) as made:
        scope = attach(made, disk / "run", spectrum_every=1, deep_every=0, capsules=0)
        step_of, ballast = made.training_step, []

        def filling(*args: Any, **kwargs: Any) -> Any:
            if made.state.global_step == 1 and not ballast:
                ballast.append(fill(disk))
            if made.state.global_step == 3 and ballast[0].exists():
                ballast[0].unlink()
                scope.recorder.journal._retry_at = 0.0
            return step_of(*args, **kwargs)

        made.training_step = filling
        made.train()
        assert made.state.global_step == 4
        assert "journal" not in scope.guard.off
        scope.detach()
        records = read_run(disk / "run")
        assert [(r.step, r.micro_step) for r in records.steps] == [(s, m) for s in range(1, 5) for m in range(2)]
        assert records.info is not None
        assert records.info.status == "finished"
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("No space left on device") == 1
    assert "can be written again" in told


def test_nothing_is_kept_where_nothing_could_be_written(tmp_path: Any) -> None:
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    with JournalWriter(tmp_path) as journal:
        journal.write(step())
    with pytest.raises(RecordError):
        read_run(Path(tmp_path))


def test_a_record_that_cannot_be_encoded_is_named_in_a_note(tmp_path: Any) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("on purpose")

    said: list[str] = []
    with JournalWriter(tmp_path, told=said.append) as journal:
        journal.write(StepRecord.model_construct(**{**dict(step(step=3)), "head": {"x": Bad()}}))
        journal.write(step(step=4))
    run = read_run(tmp_path)
    assert [r.step for r in run.steps] == [4]
    (note,) = run.notes
    assert "1 record of step 3 could not be written" in note.message
    assert "RuntimeError: on purpose" in note.message
    assert len(said) == 1
