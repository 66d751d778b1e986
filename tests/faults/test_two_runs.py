"""Two runs in one directory: the second one records beside it, and a dead run's directory is free at once."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from driftscope._run_lock import LOCK_NAME, RunLock
from driftscope.journal import open_journal, read_run
from tests.faults.processes import started
from tests.record_factory import alert, seed_step, step


def held(process: Any) -> tuple[Path, int, str]:
    """Where a process records, the child it has forked, and what it was told."""
    where, child = process.stdout.readline().rsplit(" ", 1)
    return Path(where), int(child), process.stdout.readline().strip()


def test_the_second_run_records_beside_the_first(tmp_path: Any) -> None:
    said: list[str] = []
    with started("tests.faults.writers", "hold", tmp_path / "run") as first:
        where, _, _ = held(first)
        assert where == tmp_path / "run"
        before = (where / "records.jsonl").read_bytes()
        second = open_journal(tmp_path / "run", told=said.append).journal
        assert second.run_dir == tmp_path / "run-2"
        third = open_journal(tmp_path / "run", told=said.append).journal
        assert third.run_dir == tmp_path / "run-3"
        for number in range(20):
            second.write(step(step=number + 1))
            third.write(alert(number=number + 1))
        assert (where / "records.jsonl").read_bytes() == before
        second.close()
        again = open_journal(tmp_path / "run", told=said.append).journal
        assert again.run_dir == tmp_path / "run-2"  # free again, its records set aside
        again.close()
        third.close()
    assert len(said) == 3
    for words in said:
        assert f"is in use by process {first.pid} on " in words
        assert "This run's records go to" in words
    assert len(list((tmp_path / "run-2").glob("records.*.jsonl"))) == 1
    assert len(read_run(tmp_path / "run-3").alerts) == 20


def test_a_killed_run_leaves_its_directory_free_at_once(tmp_path: Any) -> None:
    said: list[str] = []
    with started("tests.faults.writers", "hold", tmp_path / "run") as first:
        held(first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / "run" / LOCK_NAME).exists()
        second = open_journal(tmp_path / "run", told=said.append).journal
        assert second.run_dir == tmp_path / "run"
        second.close()
    assert said == []
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_a_forked_child_neither_keeps_the_lock_nor_writes(tmp_path: Any) -> None:
    """As the workers of a data loader: they inherit every descriptor, and may outlive a killed parent."""
    with started("tests.faults.writers", "hold", tmp_path / "run", "fork") as first:
        where, child, _ = held(first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        try:
            os.kill(child, 0)  # it lives
            said: list[str] = []
            second = open_journal(tmp_path / "run", told=said.append).journal
            assert second.run_dir == where
            assert said == []
            second.close()
        finally:
            os.kill(child, signal.SIGKILL)
    (aside,) = (tmp_path / "run").glob("records.*.jsonl")
    run = read_run(aside)
    assert [r.step for r in run.steps] == [1]
    assert run.notes == []  # the child has written none


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_and_used(tmp_path: Any, code: int, monkeypatch: Any) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    with open_journal(tmp_path / "run", told=said.append).journal as journal:
        journal.write(step())
        assert journal.run_dir == tmp_path / "run"
    assert len(said) == 1
    assert "gives no lock" in said[0]
    assert len(read_run(tmp_path / "run").steps) == 1


def test_a_lock_file_that_vanishes_between_open_and_lock(tmp_path: Any, monkeypatch: Any) -> None:
    """Its last holder removes it: a lock on the removed file would exclude nobody."""
    import fcntl

    flock, tries = fcntl.flock, []

    def removed_meanwhile(fd: int, how: int) -> None:
        if not tries:
            (tmp_path / LOCK_NAME).unlink()
        tries.append(fd)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    lock = RunLock(tmp_path)
    assert lock.acquire()
    assert len(tries) == 2
    monkeypatch.undo()
    assert not RunLock(tmp_path).acquire()
    lock.release()
    other = RunLock(tmp_path)
    assert other.acquire()
    other.release()


def test_the_owner_of_a_lock_without_a_name(tmp_path: Any) -> None:
    lock = RunLock(tmp_path)
    assert lock.acquire()
    (tmp_path / LOCK_NAME).write_bytes(b"\xff\xfe")
    assert lock.owner() == "another process"
    lock.release()


def test_a_run_whose_directory_was_taken_over_does_not_write_there(tmp_path: Any) -> None:
    """rm -rf of a live run's directory, and a second run in its place before the first one writes again."""
    import shutil

    said: list[str] = []
    journal = open_journal(tmp_path / "run", told=said.append).journal
    journal.write(seed_step(1))
    shutil.rmtree(tmp_path / "run")
    with started("tests.faults.writers", "hold", tmp_path / "run") as second:
        where, _, _ = held(second)
        assert where == tmp_path / "run"
        before = (where / "records.jsonl").read_bytes()
        journal.write(seed_step(2))
        journal.close()
        assert (where / "records.jsonl").read_bytes() == before
        assert f"in use by process {second.pid}" in said[0]
        assert "1 record of step 2 could not be written" in said[1]


def test_two_trainers_in_one_directory(tmp_path: Any, capsys: Any) -> None:
    from driftscope.hooks.scope import attach
    from tests.hooks.runs import trainer

    with started("tests.faults.writers", "hold", tmp_path / "run") as first:
        held(first)
        with trainer(tmp_path, max_steps=1, top_p=0.8) as made, attach(made, tmp_path / "run", spectrum_every=1):
            made.train()
    run = read_run(tmp_path / "run-2")
    assert [(r.step, r.micro_step) for r in run.steps] == [(1, 0), (1, 1)]
    assert run.info is not None
    assert run.info.settings["run_dir"] == str(tmp_path / "run-2")
    assert (tmp_path / "run-2" / "report.html").exists()
    assert [p.name for p in tmp_path.glob("run*/capsules")] == ["capsules"]
    assert (tmp_path / "run-2" / "capsules").exists()
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("is in use by process") == 1


def test_a_second_training_in_this_process_needs_no_detach_of_the_first(tmp_path: Any) -> None:
    """As when a notebook's cell runs twice: the first trainer still lives, but its training has ended."""
    from driftscope.hooks.scope import attach
    from tests.hooks.runs import trainer

    with trainer(tmp_path, max_steps=1) as first:
        one = attach(first, tmp_path / "run", spectrum_every=1, console=False)
        first.train()
        with trainer(tmp_path, max_steps=2) as second, attach(second, tmp_path / "run", console=False):
            second.train()
        one.detach()
    assert not (tmp_path / "run-2").exists()
    assert {r.step for r in read_run(tmp_path / "run").steps} == {1, 2}
    assert len(list((tmp_path / "run").glob("records.*.jsonl"))) == 1
