from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftscope.errors import RecordError, RunDirectoryError
from driftscope.journal import JournalWriter, encode, iter_records, previous_run, read_run, set_aside
from driftscope.records import Cause, StepRecord
from tests.record_factory import alert, info, note, seed_step, step, truncated_ratio


def write(directory, *records, run_info=None):
    with JournalWriter(directory) as journal:
        if run_info is not None:
            journal.write_info(run_info)
        for record in records:
            journal.write(record)
        assert journal.failed is None
    return directory / "records.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_comes_back_as_it_was_written(tmp_path):
    records = [seed_step(1), alert(), note(), seed_step(2)]
    write(tmp_path / "a" / "run", *records, run_info=info(trainer={"top_p": 0.8}))
    run = read_run(tmp_path / "a" / "run")
    assert run.info == info(trainer={"top_p": 0.8})
    assert run.steps == [records[0], records[3]]
    assert run.alerts == [records[1]]
    assert run.notes == [records[2]]
    assert run.problems == []
    assert read_run(tmp_path / "a" / "run" / "records.jsonl") == run


def test_each_line_is_readable_as_soon_as_it_is_written(tmp_path):
    with JournalWriter(tmp_path) as journal:
        journal.write(step())
        assert len(list(iter_records(tmp_path))) == 1
        journal.write(alert())
        assert len(list(iter_records(tmp_path))) == 2


def test_values_that_are_not_finite_become_null_and_are_named(tmp_path):
    record = step(residual=math.nan, is_ratio=truncated_ratio(), nonfinite=["live hidden gradient"])
    record.paths["liger"].loss = math.inf
    record.is_ratio.raw.quantiles = {"p50": -math.inf}
    record.causes = [Cause(id="normalizer", share=1.0, factor=math.inf)]
    data = lines(write(tmp_path, record))[0]
    assert data["residual"] is None
    assert data["paths"]["liger"]["loss"] is None
    assert data["nonfinite"] == [
        "live hidden gradient", "paths.liger.loss", "is_ratio.raw.quantiles.p50", "causes.0.factor", "residual",
    ]  # fmt: skip
    again = read_run(tmp_path).steps[0]
    assert again.paths["liger"].loss is None
    assert again.nonfinite == data["nonfinite"]


def test_a_share_that_is_not_finite_is_unavailable_and_costs_no_record(tmp_path):
    record = step(causes=[("normalizer", math.nan, 2.0), ("tool_mask", 0.5, 2.0)], left=math.nan, overhead_ms=math.inf)
    record.is_ratio = truncated_ratio()
    record.is_ratio.causes = [Cause(id="truncated_support", share=math.nan)]
    write(tmp_path, record)
    again = read_run(tmp_path).steps[0]
    assert [c.id for c in again.causes] == ["tool_mask"]
    assert again.unexplained is None
    assert again.is_ratio.causes == []
    assert again.overhead_ms == 0.0
    assert {"causes.0.share", "unexplained.share", "is_ratio.causes.0.share", "overhead_ms"} <= set(again.nonfinite)


class Scalar:
    """A number of another library."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


def test_foreign_values_are_written_as_numbers_or_text(tmp_path):
    head = {"a": Scalar(2.5), "b": Scalar(math.nan), "c": object, "d": (1, {2}), 3: "x\ud800"}
    data = lines(write(tmp_path, StepRecord.model_construct(**{**dict(step()), "head": head})))[0]
    assert data["head"] == {"a": 2.5, "b": None, "c": "<class 'object'>", "d": [1, [2]], "3": "x?"}
    assert "head.b" in data["nonfinite"]
    assert read_run(tmp_path).steps[0].head["a"] == 2.5


def test_info_is_replaced_in_one_step(tmp_path):
    with JournalWriter(tmp_path) as journal:
        journal.write_info(info(status="running"))
        journal.write_info(info(status="finished", model={"x": math.nan}))
        journal.write(step())
    assert read_run(tmp_path).info.status == "finished"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.jsonl", "run.json"]


def test_a_directory_that_cannot_be_written_is_told_with_its_setting(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirectoryError, match=r"run_dir=.*file/run.*cannot be written") as caught:
        JournalWriter(tmp_path / "file" / "run")
    assert "Choose a directory" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        JournalWriter(tmp_path)


def test_a_records_file_that_is_a_directory_is_told(tmp_path):
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        JournalWriter(tmp_path)


class FullDisk:
    """A stream that fails after some lines."""

    def __init__(self, stream, lines):
        self.stream, self.left = stream, lines

    def write(self, data):
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return self.stream.write(data)

    def flush(self):
        self.stream.flush()

    def close(self):
        self.stream.close()
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_remembered_and_never_raised(tmp_path):
    journal = JournalWriter(tmp_path)
    journal._stream = FullDisk(journal._stream, 2)
    for number in (1, 2, 3, 4):
        journal.write(step(step=number))
    journal.close()
    assert "No space left" in journal.failed
    assert "no further records" in journal.failed
    assert [s.step for s in read_run(tmp_path).steps] == [1, 2]


def test_a_run_json_that_cannot_be_written_leaves_the_records_alone(tmp_path):
    with JournalWriter(tmp_path) as journal:
        (tmp_path / "run.json").mkdir()
        journal.write_info(info())
        assert "run.json" in journal.failed
        journal.write(step())
    assert len(read_run(tmp_path).steps) == 1
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".run.json")]


def test_a_record_that_cannot_be_encoded_does_not_silence_the_next(tmp_path):
    class Bad:
        def __str__(self):
            raise RuntimeError("on purpose")

    with JournalWriter(tmp_path) as journal:
        journal.write(StepRecord.model_construct(**{**dict(step()), "head": {"x": Bad()}}))
        assert "could not be encoded" in journal.failed
        journal.write(step(step=2))
    assert [s.step for s in read_run(tmp_path).steps] == [2]


def test_writing_after_close_is_quiet(tmp_path):
    journal = JournalWriter(tmp_path)
    journal.close()
    journal.close()
    journal.write(step())
    assert journal.failed is None
    assert (tmp_path / "records.jsonl").read_bytes() == b""


def test_a_torn_line_of_an_earlier_crash_is_completed_before_appending(tmp_path):
    path = write(tmp_path, step(step=1))
    path.write_bytes(path.read_bytes() + b'{"kind":"step","sch')
    write(tmp_path, step(step=2))
    run = read_run(tmp_path)
    assert [s.step for s in run.steps] == [1, 2]
    assert any("1 damaged line skipped (line 2)" in p for p in run.problems)


def test_a_torn_last_line_is_skipped_with_a_note(tmp_path):
    path = write(tmp_path, step(step=1), step(step=2), run_info=info())
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(tmp_path)
    assert [s.step for s in run.steps] == [1]
    assert run.problems == ["The last line (2) is incomplete and was skipped: still being written, or cut off."]


def test_a_complete_last_line_without_a_newline_counts(tmp_path):
    path = write(tmp_path, step(step=1), run_info=info())
    path.write_bytes(path.read_bytes()[:-1])
    run = read_run(tmp_path)
    assert len(run.steps) == 1
    assert run.problems == []


def test_damaged_lines_are_counted_and_named(tmp_path):
    good = json.dumps(encode(step()))
    bad = ["{", "3", '{"kind":"step","schema":1}', "\xff\x00", '{"kind":"step"}', "[" * 100_000]
    text = "\n".join([good, *bad, "", good, ""])
    (tmp_path / "records.jsonl").write_text(text, encoding="latin-1")
    run = read_run(tmp_path)
    assert len(run.steps) == 2
    assert "6 damaged lines skipped (lines 2, 3, 4, 5, 6, 7)." in run.problems


def test_many_damaged_lines_are_named_in_part(tmp_path):
    (tmp_path / "records.jsonl").write_text(json.dumps(encode(step())) + "\n" + "x\n" * 30)
    assert (
        "30 damaged lines skipped (lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 20 more)." in read_run(tmp_path).problems
    )


def test_an_overlong_line_is_damaged_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("driftscope._journal_reader.MAX_LINE_BYTES", 8192)
    good = json.dumps(encode(step())).encode()
    (tmp_path / "records.jsonl").write_bytes(b"x" * 30_000 + b"\n" + good + b"\n")
    run = read_run(tmp_path)
    assert len(run.steps) == 1
    assert "1 damaged line skipped (line 1)." in run.problems


def test_unknown_kinds_are_ignored_with_a_note(tmp_path):
    path = write(tmp_path, step(), run_info=info())
    path.write_text(path.read_text() + '{"kind":"sketch","schema":1}\n')
    run = read_run(tmp_path)
    assert len(run.steps) == 1
    assert run.problems == ["1 line of unknown kind 'sketch' ignored (line 2)."]


@pytest.mark.parametrize("schema", [0, 2, 999])
def test_an_unknown_schema_is_refused_with_its_line(tmp_path, schema):
    write(tmp_path, step(), step(schema=schema))
    with pytest.raises(RecordError, match=rf"line 2: schema version {schema} is unknown.*reads version 1"):
        read_run(tmp_path)


def test_an_unknown_schema_of_the_info_is_refused(tmp_path):
    write(tmp_path, step(), run_info=info(schema=7))
    with pytest.raises(RecordError, match="schema version 7"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema":1}', '{"schema":"1","run_id":"a"}', "[" * 100_000])
def test_a_damaged_or_missing_info_costs_only_the_info(tmp_path, content):
    write(tmp_path, step())
    if content:
        (tmp_path / "run.json").write_text(content)
    run = read_run(tmp_path)
    assert run.info is None
    assert len(run.steps) == 1
    assert "run.json" in run.problems[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"kind":"st', "no complete record"),
        (b"hello\nworld\n", "not a Driftscope records file: none of its 2 lines"),
        (b'{"kind":"Pod","apiVersion":"v1"}\n', "not a Driftscope records file"),
        (bytes(range(256)) * 4, "not a Driftscope records file"),
        (b"\n\n\n", "not a Driftscope records file"),
    ],
)
def test_what_is_no_records_file_is_said_so(tmp_path, content, message):
    (tmp_path / "records.jsonl").write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_run(tmp_path)


def test_what_is_missing_is_said_so(tmp_path):
    with pytest.raises(RecordError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"holds no records.jsonl"):
        read_run(tmp_path)


def test_streaming_does_not_read_ahead(tmp_path):
    path = write(tmp_path, step(step=1))
    path.write_bytes(path.read_bytes() + b"x\n")
    problems = []
    stream = iter_records(path, problems)
    assert next(stream).step == 1
    assert problems == []
    assert list(stream) == []
    assert problems == ["1 damaged line skipped (line 2)."]


def test_numbers_that_json_does_not_have_are_read_as_unavailable(tmp_path):
    text = json.dumps(encode(step())).replace('"residual": 3e-07', '"residual": NaN')
    (tmp_path / "records.jsonl").write_text(text + "\n" + text.replace("NaN", "1e999") + "\n")
    for record in read_run(tmp_path).steps:
        assert record.residual is None
        assert record.nonfinite == ["residual"]


def test_reading_needs_no_torch(tmp_path):
    write(tmp_path, step())
    code = (
        "import sys; from driftscope.journal import read_run; from driftscope.verdict import judge;"
        "judge(read_run(sys.argv[1]));"
        "assert not {'torch', 'trl', 'plotly', 'rich', 'liger_kernel'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=40, deadline=None)
@given(ratio=FLOATS, factor=FLOATS, share=FLOATS, residual=FLOATS, left=FLOATS, head=FLOATS)
def test_any_numbers_survive_the_way_to_disk(tmp_path_factory, ratio, factor, share, residual, left, head):
    record = step(ratio=1.0, causes=[("normalizer", share, factor)], left=left, residual=residual, head={"x": head})
    record.gap.grad_norm_ratio = ratio
    path = write(tmp_path_factory.mktemp("run"), record)
    again = read_run(path).steps[0]
    assert (again.gap.grad_norm_ratio, again.residual, again.head["x"]) == tuple(
        v if math.isfinite(v) else None for v in (ratio, residual, head)
    )
    assert ("gap.grad_norm_ratio" in again.nonfinite) == (not math.isfinite(ratio))
    assert ("causes.0.share" in again.nonfinite) == (not math.isfinite(share))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_told_or_survived(tmp_path_factory, data):
    """Cut, overwrite or insert bytes: a RecordError with a message, or a run whose undamaged lines are all there."""
    directory = tmp_path_factory.mktemp("run")
    path = write(directory, *(step(step=n) for n in (1, 2, 3)), alert())
    whole = path.read_bytes()
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, min(len(whole), begin + 60)))
    damaged = whole[:begin] + data.draw(st.binary(max_size=20)) + whole[end:]
    path.write_bytes(damaged)
    try:
        run = read_run(directory)
    except RecordError as error:
        message = str(error)
    else:
        kept = set(whole.splitlines()) & set(damaged.split(b"\n"))
        assert len(run.steps) + len(run.alerts) >= len(kept)
        return
    assert any(known in message for known in ("schema version", "records file", "no complete record", "is empty"))


def test_an_earlier_run_is_set_aside(tmp_path):
    write(tmp_path, note(), run_info=info(run_id="first"))
    assert previous_run(tmp_path).run_id == "first"
    set_aside(tmp_path, previous_run(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.first.jsonl", "run.first.json"]
    assert previous_run(tmp_path) is None
    set_aside(tmp_path, None)  # nothing left to do
