"""A run that goes on from a checkpoint: the same journal, no step twice, none missing without a word."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from driftscope import _journal_start
from driftscope.journal import encode, open_journal, read_run
from tests.faults.disks import fill, small_disk
from tests.faults.processes import started
from tests.record_factory import alert, info, note, seed_step


def record(run_dir: Path, first: int, last: int, *, resumed_at: int = 0, run_id: str = "mine") -> list[str]:
    """Record steps first to last, two micro-batches and an alert each; returns what was told."""
    said: list[str] = []
    opened = open_journal(run_dir, resumed_at=resumed_at, told=said.append)
    with opened.journal as journal:
        before = opened.before
        journal.write_info(info(run_id=before.run_id if before is not None else run_id))
        for number in range(first, last + 1):
            for micro_step in range(2):
                journal.write(seed_step(number, micro_step=micro_step))
            journal.write(alert(number=number))
        assert journal.failed is None
    return said


def seen(run_dir: Path) -> tuple[list[tuple[int, int]], list[int]]:
    """(step, micro_step) of the step records and the steps of the alerts, in file order."""
    run = read_run(run_dir)
    return [(r.step, r.micro_step) for r in run.steps], [a.step for a in run.alerts]


def whole(last: int) -> tuple[list[tuple[int, int]], list[int]]:
    return [(s, m) for s in range(1, last + 1) for m in range(2)], list(range(1, last + 1))


def test_resumed_at_the_last_recorded_step(tmp_path: Any) -> None:
    record(tmp_path, 1, 6)
    assert record(tmp_path, 7, 10, resumed_at=6) == []
    assert seen(tmp_path) == whole(10)
    assert read_run(tmp_path).notes == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.jsonl", "run.json"]


def test_resumed_before_the_last_recorded_step(tmp_path: Any) -> None:
    record(tmp_path, 1, 10)
    first = (tmp_path / "records.jsonl").read_bytes()
    (said,) = record(tmp_path, 7, 12, resumed_at=6)
    assert "Resumed at step 6: 12 lines after it are set aside in records.mine.after-step-6.jsonl" in said
    assert seen(tmp_path) == whole(12)
    run = read_run(tmp_path)
    assert run.notes == []
    assert run.problems == []
    assert run.info is not None
    assert run.info.run_id == "mine"
    aside = tmp_path / "records.mine.after-step-6.jsonl"
    assert {r.step for r in read_run(aside).steps} == {7, 8, 9, 10}
    kept = (tmp_path / "records.jsonl").read_bytes()
    at = first.index(aside.read_bytes())
    assert kept.startswith(first[:at])  # what stays is the same bytes
    assert first == first[:at] + aside.read_bytes()  # and nothing is in neither


def test_resumed_again_and_again_from_the_same_checkpoint(tmp_path: Any) -> None:
    record(tmp_path, 1, 10)
    for _ in range(3):
        record(tmp_path, 7, 12, resumed_at=6)
    record(tmp_path, 4, 5, resumed_at=3)
    assert seen(tmp_path) == whole(5)
    names = sorted(p.name for p in tmp_path.glob("records.*.jsonl"))
    assert names == [
        "records.mine.after-step-3.jsonl", "records.mine.after-step-6-2.jsonl", "records.mine.after-step-6-3.jsonl",
        "records.mine.after-step-6.jsonl",
    ]  # fmt: skip


def test_resumed_after_a_kill_within_a_line(tmp_path: Any) -> None:
    record(tmp_path, 1, 6)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps(encode(seed_step(7))).encode()[:300])
    record(tmp_path, 7, 8, resumed_at=6)
    assert seen(tmp_path) == whole(8)
    assert read_run(tmp_path).problems == []


def test_resumed_after_a_kill_within_a_window(tmp_path: Any) -> None:
    record(tmp_path, 1, 6)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps(encode(seed_step(7))).encode() + b"\n")  # the first of two
    record(tmp_path, 7, 8, resumed_at=6)
    assert seen(tmp_path) == whole(8)


def test_steps_that_are_missing_are_named(tmp_path: Any) -> None:
    record(tmp_path, 1, 6)
    (said,) = record(tmp_path, 10, 12, resumed_at=9)
    assert "the records end at step 6, steps 7 to 9 are not on record" in said
    (gap,) = read_run(tmp_path).notes
    assert (gap.stage, gap.step) == ("journal", 7)
    assert gap.message == said
    record(tmp_path, 12, 13, resumed_at=11)  # the note stays, it is about what stays
    assert [n.step for n in read_run(tmp_path).notes] == [7]


def test_notes_of_what_is_recorded_again_go_with_it(tmp_path: Any) -> None:
    record(tmp_path, 1, 6)
    with open_journal(tmp_path, resumed_at=6, told=lambda _: None).journal as journal:
        journal.write(note("a stage failed at 8", number=8))
        journal.write(note("lost at 4", number=4))
        journal.write(seed_step(7))
    record(tmp_path, 7, 7, resumed_at=6)
    assert [n.message for n in read_run(tmp_path).notes] == ["lost at 4"]
    assert seen(tmp_path) == whole(7)


def test_resumed_in_another_directory(tmp_path: Any) -> None:
    record(tmp_path / "a", 1, 6)
    before = (tmp_path / "a" / "records.jsonl").read_bytes()
    (said,) = record(tmp_path / "b", 7, 8, resumed_at=6)
    assert "holds no earlier records, this journal begins at step 7" in said
    assert [r.step for r in read_run(tmp_path / "b").steps] == [7, 7, 8, 8]
    assert read_run(tmp_path / "b").notes == []
    assert (tmp_path / "a" / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"{", b"\x00" * 400, b'{"schema": 1}', b"[" * 100_000])
def test_a_damaged_run_json_does_not_stop_a_resumed_run(tmp_path: Any, damage: bytes) -> None:
    record(tmp_path, 1, 6)
    (tmp_path / "run.json").write_bytes(damage)
    said = record(tmp_path, 5, 8, resumed_at=4, run_id="new")
    assert seen(tmp_path) == whole(8)
    run = read_run(tmp_path)
    assert run.info is not None
    assert run.info.run_id == "new"
    assert (tmp_path / "run.damaged.json").read_bytes() == damage
    assert "set aside as run.damaged.json" in said[0]


def test_a_full_disk_when_the_later_records_are_set_aside(tmp_path: Any) -> None:
    """There is no room for a copy: the whole journal is renamed instead, which needs none."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        record(disk / "run", 1, 20)
        ballast = fill(disk)
        said: list[str] = []
        journal = open_journal(disk / "run", resumed_at=6, told=said.append).journal
        ballast.unlink()
        journal._retry_at = 0.0
        journal.write(seed_step(7))
        journal.close()
        assert any("could not be cut back (No space left on device)" in words for words in said)
        assert [r.step for r in read_run(disk / "run").steps] == [7]
        assert any("could not be cut back" in n.message for n in read_run(disk / "run").notes)
        assert {r.step for r in read_run(disk / "run" / "records.mine.jsonl").steps} == set(range(1, 21))


def test_long_journals_and_over_long_lines_are_cut_at_the_right_place(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_journal_start, "BLOCK_BYTES", 997)
    monkeypatch.setattr(_journal_start, "MAX_LINE_BYTES", 3000)
    rng = random.Random(1)
    record(tmp_path, 1, 1)
    lines = []
    for number in range(2, 60):
        lines.append(json.dumps(encode(seed_step(number))) + "\n")
        if rng.random() < 0.3:
            lines.append("x" * rng.randrange(1, 9000) + "\n")
        lines.append(json.dumps(encode(seed_step(number, micro_step=1))) + "\n")
        lines.append(json.dumps(encode(alert(number=number))) + "\n")
    for resumed_at in (58, 41, 17, 2, 1):
        record(tmp_path, 1, 1)
        with (tmp_path / "records.jsonl").open("a") as stream:
            stream.writelines(lines)
        record(tmp_path, resumed_at + 1, 60, resumed_at=resumed_at)
        assert seen(tmp_path) == whole(60), resumed_at


def test_an_old_run_of_the_same_second_is_not_overwritten(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    for number in range(1, 4):
        with open_journal(tmp_path, told=lambda _: None).journal as journal:
            journal.write(seed_step(number))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "records.1700000000-2.jsonl", "records.1700000000.jsonl", "records.jsonl"
    ]  # fmt: skip


def test_the_temporary_files_of_a_killed_run_are_removed(tmp_path: Any) -> None:
    record(tmp_path, 1, 2)
    (tmp_path / ".run.json.12345").write_text('{"half')
    record(tmp_path, 3, 4, resumed_at=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.jsonl", "run.json"]


# -- real trainers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [False, True])
def test_a_trainer_resumed_from_an_earlier_checkpoint(tmp_path: Any, other: bool, caplog: Any) -> None:
    from tests.faults.trainings import train

    train(tmp_path, 4, 0, tmp_path / "run")
    before = read_run(tmp_path / "run")
    target = tmp_path / ("other" if other else "run")
    train(tmp_path, 6, 2, target)
    run = read_run(target)
    begin = 3 if other else 1
    steps = [r.step for r in run.steps]
    assert sorted(set(steps)) == list(range(begin, 7))
    assert len({(r.step, r.micro_step, r.rank) for r in run.steps}) == len(steps)
    assert steps == sorted(steps)
    assert len({(a.rule, a.step, a.rank) for a in run.alerts}) == len(run.alerts)
    assert run.alerts
    assert run.notes == []
    assert run.info is not None
    assert before.info is not None
    assert (run.info.run_id == before.info.run_id) is not other
    assert run.info.status == "finished"
    assert "Resumed at step 2" in caplog.text
    if not other:
        assert [r.step for r in run.steps if r.step <= 2] == [r.step for r in before.steps if r.step <= 2]


@pytest.mark.slow
def test_a_trainer_killed_at_random_moments_goes_on(tmp_path: Any) -> None:
    """One training of 12 steps in four lives, each killed while it trains and resumed from its newest checkpoint."""
    moments = random.Random(5)
    path = tmp_path / "run" / "records.jsonl"
    resumed_at, kills, last = 0, 0, 12
    while kills < 4:
        with started("tests.faults.trainings", tmp_path, last, resumed_at) as process:
            size = path.stat().st_size if path.exists() else -1
            until = time.monotonic() + 120
            while process.poll() is None and (not path.exists() or path.stat().st_size <= max(size, 0)):
                assert time.monotonic() < until, "the trainer does not begin to record"
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 1.0))
            process.send_signal(signal.SIGKILL)
            process.wait()
        kills += 1
        for line in path.read_bytes().split(b"\n")[:-1]:
            json.loads(line)
        json.loads((tmp_path / "run" / "run.json").read_text())
        resumed_at = max(_complete(tmp_path / "trainer"), default=0)
        if resumed_at == last:
            break
    if resumed_at < last:
        with started("tests.faults.trainings", tmp_path, last, resumed_at) as process:
            assert process.wait(timeout=200) == 0
    run = read_run(tmp_path / "run")
    assert sorted({r.step for r in run.steps}) == list(range(1, last + 1))
    assert len({(r.step, r.micro_step, r.rank) for r in run.steps}) == len(run.steps)
    assert len({(a.rule, a.step, a.rank) for a in run.alerts}) == len(run.alerts)
    assert run.notes == []
    assert [p for p in run.problems if "damaged" in p] == []


def _complete(directory: Path) -> list[int]:
    """Steps of the checkpoints that were written to their end."""
    states = directory.glob("checkpoint-*/trainer_state.json")
    return [int(p.parent.name.rpartition("-")[2]) for p in states if os.access(p, os.R_OK) and _readable(p)]


def _readable(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True
