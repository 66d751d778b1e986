"""What was summed up of a journal is kept beside it: used where it fits, passed over where it does not."""

from __future__ import annotations

import json
import os
import pickle
import stat
import sys
import time
import zlib

import pytest

from driftscope.errors import RecordError
from driftscope.journal import read_run
from driftscope.reading import Keeper, cache, last_steps, read_any, scan, summarise, summary
from driftscope.reading.columns import STRETCHES
from tests.long_runs import long_run, outcome, random_records, write
from tests.record_factory import honest_ratio, seed_step, step


@pytest.fixture
def small_cache(monkeypatch):
    """Keep what was summed up of small journals too."""
    monkeypatch.setattr(cache, "CACHE_BYTES", 1)


def cached(directory):
    return directory / "records.summary"


def test_a_later_reader_goes_on_where_an_earlier_one_stopped(tmp_path, small_cache, monkeypatch):
    directory = long_run(tmp_path, 3000, {1001: 500.0})
    first = outcome(summarise(directory))
    assert cached(directory).stat().st_size < 5_000_000
    read = []
    real = scan.lines
    monkeypatch.setattr(scan, "lines", lambda s, a, b: (read.append(b - a), real(s, a, b))[1])
    assert outcome(summarise(directory)) == first
    assert sum(read) <= 2 * scan.BUFFER  # the ends, to find the first and last step
    long_run(tmp_path, 4000, {5001: 900.0}, first=3001, append=True)
    grown, anew = summarise(directory), summarise(directory, cached=False)
    assert outcome(grown) == outcome(anew)
    assert grown.figures["gap.grad_norm_ratio"].extremes() == anew.figures["gap.grad_norm_ratio"].extremes()
    assert grown.figures["gap.grad_norm_ratio"].extremes()[1] == 900.0
    kept = {r.step for r in grown.kept()}
    assert {1001, 5001, 7000} <= kept
    assert grown.alerts.rules["DS101"].by_stretch[2] != [0] * STRETCHES
    assert sum(grown.alerts.rules["DS101"].by_stretch[2]) == anew.alerts.rules["DS101"].count == 350


def test_a_line_that_is_being_written_is_not_kept(tmp_path, small_cache):
    directory = write(tmp_path, [step(step=n, is_ratio=honest_ratio()) for n in range(1, 9)])
    file = directory / "records.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert summarise(directory).problems == ["The last line (8) is incomplete and was skipped: still being written, "
                                             "or cut off."]  # fmt: skip
    assert cached(directory).exists()
    file.write_bytes(whole)
    assert summarise(directory).problems == []
    assert summarise(directory).records == 8


def edit_middle(file):
    """Change a sampled byte, keep the size."""
    data = bytearray(file.read_bytes())
    at = data.index(b'"liger"', len(data) // 2)
    data[at + 1 : at + 6] = b"other"
    file.write_bytes(data)


def other_run(file):
    write(file.parent, [step(step=n, is_ratio=honest_ratio()) for n in range(1, 60)])


SPOILT = {
    "cut off": lambda file, side: side.write_bytes(side.read_bytes()[:-50]),
    "empty": lambda file, side: side.write_bytes(b""),
    "foreign": lambda file, side: side.write_bytes(os.urandom(5000)),
    "a text": lambda file, side: side.write_text('{"end": 5}\nhello'),
    "of another journal": lambda file, side: other_run(file),
    "of a longer journal": lambda file, side: file.write_text("".join(file.read_text().splitlines(True)[:30])),
    "of a journal since edited": lambda file, side: edit_middle(file),
    "of other thresholds": lambda file, side: (file.parent / "run.json").write_text(
        (file.parent / "run.json").read_text().replace('"gap_critical":10.0', '"gap_critical":900.0')
    ),
    "a directory": lambda file, side: (side.unlink(), side.mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_a_cache_that_is_wrong_is_passed_over(tmp_path, small_cache, how):
    directory = write(tmp_path, [seed_step(n) for n in range(1, 50)])
    summarise(directory)
    SPOILT[how](directory / "records.jsonl", cached(directory))
    assert outcome(summarise(directory)) == outcome(summarise(directory, cached=False)) == outcome(read_run(directory))
    assert outcome(summarise(directory)) == outcome(read_run(directory))  # from the cache that was made anew


class Planted:
    """What a hostile cache would run."""

    def __reduce__(self):
        return (os.mkdir, ("planted",))


def test_a_cache_cannot_run_code(tmp_path, small_cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = write(tmp_path / "run", [seed_step(n) for n in range(1, 9)])
    summarise(directory)
    head, _, body = cached(directory).read_bytes().partition(b"\n")
    state = pickle.loads(zlib.decompress(body))
    state["live"] = Planted()
    body = zlib.compress(pickle.dumps(state))
    named = {**json.loads(head), "sum": cache.hashlib.sha256(body).hexdigest()}
    cached(directory).write_bytes(json.dumps(named).encode() + b"\n" + body)
    assert outcome(summarise(directory)) == outcome(read_run(directory))
    assert not (tmp_path / "planted").exists()


def test_a_directory_that_cannot_be_written_does_without(tmp_path, small_cache, monkeypatch):
    directory = write(tmp_path / "run", [seed_step(n) for n in range(1, 9)])
    directory.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert outcome(summarise(directory)) == outcome(read_run(directory))
        if os.geteuid() == 0:  # root writes anywhere: refuse it otherwise
            cached(directory).unlink()
            monkeypatch.setattr("pathlib.Path.write_bytes", lambda *a: (_ for _ in ()).throw(OSError(30, "read-only")))
            assert outcome(summarise(directory)) == outcome(read_run(directory))
        assert not cached(directory).exists()
    finally:
        directory.chmod(stat.S_IRWXU)


def test_a_small_journal_leaves_nothing_behind(tmp_path):
    directory = write(tmp_path, [seed_step(1)])
    read_any(directory)
    summarise(directory)
    assert sorted(p.name for p in directory.iterdir()) == ["records.jsonl", "run.json"]


def test_read_any_chooses_by_size(tmp_path, monkeypatch):
    directory = write(tmp_path, random_records(5))
    assert type(read_any(directory)).__name__ == "Run"
    monkeypatch.setattr(summary, "STREAM_BYTES", 10)
    assert type(read_any(directory)).__name__ == "Summary"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("buffer", [7, 4096, 2**20])
def test_the_last_steps_are_read_from_the_end(tmp_path, monkeypatch, seed, buffer):
    monkeypatch.setattr(scan, "BUFFER", buffer)
    directory = write(tmp_path, random_records(seed)[: 3 if buffer == 7 else None], seed)
    try:
        whole = read_run(directory).steps
    except RecordError:
        whole = []
    for limit in (0, 1, 5, 10**6):
        assert last_steps(directory, limit) == whole[len(whole) - min(limit, len(whole)) :]


def test_the_keeper_makes_the_cache_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("driftscope.reading.keeper._CODE", "import driftscope.reading.cache as c; c.CACHE_BYTES = 1\n"
                        "import sys; from driftscope.reading import summarise; summarise(sys.argv[2])")  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    directory = long_run(tmp_path, 200, {})
    keeper = Keeper(directory / "records.jsonl", every_bytes=1000)
    keeper.poll()
    keeper.poll()  # one reader at a time
    deadline = time.monotonic() + 60
    while not cached(directory).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cached(directory).exists()
    keeper.close()
    keeper.close()
    Keeper(tmp_path / "nowhere").poll()
