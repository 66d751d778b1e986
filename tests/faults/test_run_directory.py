"""What somebody does to the run directory while a run writes there: the run goes on, told once, and records again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from driftscope.errors import RunDirectoryError
from driftscope.journal import JournalWriter, open_journal, read_run
from tests.faults.disks import small_disk
from tests.record_factory import info, step


class Recording:
    """A journal of a run that has written three steps."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self.said: list[str] = []
        self.now = 0.0
        self.run_dir = run_dir
        self.journal = open_journal(run_dir, told=self.said.append).journal
        self.journal._clock = lambda: self.now
        self.journal.write_info(info(run_id="mine"))
        self.write(1, 2, 3)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.journal.write(step(step=number))

    def steps(self) -> list[int]:
        return [r.step for r in read_run(self.run_dir).steps]


def test_a_directory_that_vanishes_is_made_again(tmp_path: Any) -> None:
    run = Recording(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    run.write(4, 5)
    run.journal.close()
    found = read_run(tmp_path / "run")
    assert [r.step for r in found.steps] == [4, 5]
    assert found.info is not None
    assert found.info.run_id == "mine"
    (note,) = found.notes
    assert (
        "the run directory had vanished and was made again: up to 3 records of steps 1 to 3 are gone" in note.message
    )
    assert len(run.said) == 1
    assert found.problems == []
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["records.jsonl", "run.json"]


def test_a_records_file_that_vanishes_is_made_again(tmp_path: Any) -> None:
    run = Recording(tmp_path / "run")
    (tmp_path / "run" / "records.jsonl").unlink()
    run.write(4)
    run.journal.close()
    assert run.steps() == [4]
    (note,) = read_run(tmp_path / "run").notes
    assert "records.jsonl had vanished and was made again: up to 3 records" in note.message


def test_a_directory_whose_parent_vanishes_is_not_made_again(tmp_path: Any) -> None:
    """The file system may have been unmounted: what is made in its place would be hidden when it comes back."""
    (tmp_path / "runs").mkdir()
    run = Recording(tmp_path / "runs" / "run")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    run.write(4, 5)
    assert not (tmp_path / "runs").exists()
    assert len(run.said) == 1
    assert "is gone or is another file system now" in run.said[0]
    (tmp_path / "elsewhere").rename(tmp_path / "runs")
    run.now = 100.0
    run.write(6)
    run.journal.close()
    assert run.steps() == [1, 2, 3, 4, 5, 6]  # what waited meanwhile is there
    assert read_run(tmp_path / "runs" / "run").notes == []


def test_an_unmounted_disk_is_waited_for(tmp_path: Any) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "runs").mkdir()
        run = Recording(disk / "runs" / "run")
        subprocess.run(["umount", "-l", str(disk)], check=True)
        (disk / "runs").mkdir()  # as an empty mount point may look
        run.write(4)
        assert list((disk / "runs").iterdir()) == []
        assert "another file system now" in run.said[0]
        run.journal.close()
        assert "1 record of step 4 could not be written" in run.said[1]
        subprocess.run(["mount", "-t", "tmpfs", "driftscope-test", str(disk)], check=True)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_records_file_that_is_cut_goes_on_with_a_line_of_its_own(tmp_path: Any, keep: int) -> None:
    run = Recording(tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - len(whole) // 3 + keep] if keep else b"")
    run.write(4, 5)
    run.journal.close()
    found = read_run(tmp_path / "run")
    assert [r.step for r in found.steps] == ([1, 2, 4, 5] if keep else [4, 5])
    assert len(found.problems) == (1 if keep else 0)
    (note,) = found.notes
    assert "was cut from" in note.message
    assert len(run.said) == 1


def test_a_records_file_that_an_editor_replaced_is_continued(tmp_path: Any) -> None:
    run = Recording(tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").rename(path)
    run.write(4)
    run.journal.close()
    assert run.steps() == [1, 2, 3, 4]
    assert "was replaced by another file, which is continued" in run.said[0]


@pytest.mark.parametrize("content", ["my notes\n", '{"kind": "Pod"}\n', "\x00" * 50])
def test_another_file_at_the_same_path_is_left_alone(tmp_path: Any, content: str) -> None:
    run = Recording(tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    path.unlink()
    path.write_text(content)
    for number in range(4, 10):
        run.now += 100.0
        run.write(number)
    assert path.read_text() == content
    assert len(run.said) == 1
    assert "is something else now and is left alone" in run.said[0]
    path.unlink()
    run.now += 100.0
    run.write(10)
    run.journal.close()
    assert run.steps() == [4, 5, 6, 7, 8, 9, 10]


def test_a_run_directory_that_becomes_a_file(tmp_path: Any) -> None:
    run = Recording(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file")
    run.write(4)
    assert (tmp_path / "run").read_text() == "a file"
    assert len(run.said) == 1
    (tmp_path / "run").unlink()
    run.now = 10.0
    run.write(5)
    run.journal.close()
    assert run.steps() == [4, 5]


def test_a_records_file_that_becomes_a_directory(tmp_path: Any) -> None:
    run = Recording(tmp_path / "run")
    (tmp_path / "run" / "records.jsonl").unlink()
    (tmp_path / "run" / "records.jsonl").mkdir()
    run.write(4)
    run.journal.close()
    assert len(run.said) == 2
    assert "1 record of step 4 could not be written" in run.said[1]


def test_a_read_only_file_system_is_told_with_its_setting(tmp_path: Any) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(RunDirectoryError, match=r"Read-only file system.*Choose a directory"):
            open_journal(disk / "run", told=lambda _: None)


def test_a_file_system_that_becomes_read_only_is_waited_for(tmp_path: Any) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = Recording(disk / "run")
        run.journal.rest()  # a file that is open for writing would keep it writable
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        run.write(4)
        assert "Read-only file system" in run.said[0]
        assert len(run.said) == 1
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        run.now = 10.0
        run.write(5)
        run.journal.close()
        assert run.steps() == [1, 2, 3, 4, 5]


def test_a_journal_at_rest_does_not_write_into_another_run(tmp_path: Any) -> None:
    first = Recording(tmp_path / "run")
    first.journal.rest()
    second = Recording(tmp_path / "run")
    assert second.journal.run_dir == tmp_path / "run"
    first.write(4)
    second.journal.close()
    first.now = 100.0
    first.write(5)
    first.journal.close()
    assert second.steps() == [1, 2, 3]
    assert "belongs to a run that began there since" in first.said[0]


def test_trainers_go_on(tmp_path: Any, capsys: Any) -> None:
    from driftscope.hooks.scope import attach
    from tests.hooks.runs import trainer

    with trainer(tmp_path, max_steps=4) as made, attach(made, tmp_path / "run", spectrum_every=1) as scope:
        step_of = made.training_step

        def destructive(*args: Any, **kwargs: Any) -> Any:
            if made.state.global_step == 2:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
            return step_of(*args, **kwargs)

        made.training_step = destructive
        made.train()
        assert made.state.global_step == 4
        assert "journal" not in scope.guard.off
    found = read_run(tmp_path / "run")
    assert [(r.step, r.micro_step) for r in found.steps] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert found.info is not None
    assert found.info.status == "finished"
    assert any("had vanished" in n.message for n in found.notes)
    assert "had vanished" in " ".join(capsys.readouterr().err.split())


def test_a_writer_does_not_notice_readers(tmp_path: Any) -> None:
    with JournalWriter(tmp_path, told=lambda words: pytest.fail(words)) as journal:
        for number in range(1, 30):
            journal.write(step(step=number))
            read_run(tmp_path)
