"""The record reader on damaged files: a RecordError with words, or every undamaged line and a count of the others.

The same files every time; ``HYPOTHESIS_PROFILE=long`` tries fifty times as many, others each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from driftscope.cli import main
from driftscope.errors import RecordError
from driftscope.journal import Run, encode, iter_records, read_run
from driftscope.verdict import judge
from tests.record_factory import alert, honest_ratio, info, note, seed_step, step

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
FACTOR = 50 if LONG else 1


def examples(count: int) -> Any:
    """Settings of one property."""
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    options: dict[str, Any] = {"deadline": None, "suppress_health_check": SLOW, "phases": phases, "database": None}
    return settings(max_examples=count * FACTOR, derandomize=not LONG, **options)


def lines_of(*records: Any) -> list[bytes]:
    return [json.dumps(encode(record), allow_nan=False).encode("ascii") for record in records]


JOURNAL = lines_of(
    seed_step(1), alert(number=1), step(step=2, is_ratio=honest_ratio()), note(number=2), seed_step(3, micro_step=1),
    alert("DS201", "warning", number=3), step(step=4), seed_step(5), note("another", number=5),
)  # fmt: skip
OTHER = lines_of(step(step=1, live="reference"), note("of another run", number=7), seed_step(9))
WHOLE = b"".join(line + b"\n" for line in JOURNAL)
INFO = json.dumps(encode(info(trainer={"top_p": 0.8}, settings={"gap_warning": 1.5, "gap_critical": 10.0})))


def read(directory: Path, data: bytes, run_json: bytes | str | None = INFO) -> tuple[Run | None, str]:
    """The run that a file with this content gives, or ``None`` and the words of the refusal."""
    (directory / "records.jsonl").write_bytes(data)
    path = directory / "run.json"
    path.unlink(missing_ok=True)
    if run_json is not None:
        path.write_bytes(run_json if isinstance(run_json, bytes) else run_json.encode())
    try:
        run = read_run(directory)
    except RecordError as error:
        why = str(error)
    else:
        return run, ""
    assert len(why) > 40
    return None, why


def survives(directory: Path, run: Run | None) -> None:
    """``judge`` gives a verdict on whatever was read, and ``driftscope check`` an exit code without a traceback."""
    if run is not None:
        assert judge(run).headline
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", str(directory), "--json"])
    assert code in (0, 1, 2)
    assert "Traceback" not in err.getvalue()
    if run is None:
        assert code == 2
        assert err.getvalue().startswith("driftscope: ")
    elif code in (0, 1):
        json.loads(out.getvalue())


def counted(problems: list[str]) -> int:
    """Lines that the problems say were skipped."""
    total = 0
    for problem in problems:
        if "run.json" in problem:
            continue
        found = re.match(r"(\d+) (damaged )?lines? ", problem)
        total += int(found.group(1)) if found else "The last line" in problem
    return total


def look(directory: Path, data: bytes) -> Run | None:
    """The properties that hold for every file; returns the run where one was read."""
    run, why = read(directory, data)
    survives(directory, run)
    lines = [line for line in data.split(b"\n") if line.strip()]
    whole = [line for line in lines if line in JOURNAL or line in OTHER]
    if run is None:
        if "schema version" not in why:
            assert whole == [], f"{len(whole)} undamaged lines were refused: {why}"
        return None
    problems: list[str] = []
    records = list(iter_records(directory, problems))
    assert len(records) == len(run.steps) + len(run.alerts) + len(run.notes)
    assert len(records) + counted(problems) == len(lines)  # every line is a record or was told
    again = [json.dumps(encode(record)).encode() for record in records]
    kept = iter(again)
    for line in whole:  # every undamaged line, in the order of the file
        assert any(line == candidate for candidate in kept), line[:200]
    for record in records:  # and none that the file does not hold
        assert any(_says(line, record) for line in lines), record
    return run


def _says(line: bytes, record: Any) -> bool:
    """Whether a line of the file is that record by itself: no record is put together from two lines."""
    try:
        data = json.loads(line)
        return isinstance(data, dict) and data.get("kind") == record.kind and int(data["step"]) == record.step
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


SPANS = st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 3000)).map(lambda t: (t[0], min(len(WHOLE), sum(t))))


@examples(60)
@given(end=st.integers(0, len(WHOLE)))
def test_cut_off_anywhere(tmp_path: Any, end: int) -> None:
    run = look(tmp_path, WHOLE[:end])
    complete = WHOLE[:end].count(b"\n")
    if run is not None:
        assert len(run.steps) + len(run.alerts) + len(run.notes) >= complete
    else:
        assert complete == 0


@examples(60)
@given(bits=st.lists(st.integers(0, 8 * len(WHOLE) - 1), min_size=1, max_size=8))
def test_flipped_bits(tmp_path: Any, bits: list[int]) -> None:
    data = bytearray(WHOLE)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    look(tmp_path, bytes(data))


@examples(40)
@given(span=SPANS, order=st.randoms(use_true_random=False))
def test_shuffled_bytes(tmp_path: Any, span: tuple[int, int], order: Any) -> None:
    part = list(WHOLE[span[0] : span[1]])
    order.shuffle(part)
    look(tmp_path, WHOLE[: span[0]] + bytes(part) + WHOLE[span[1] :])


@examples(40)
@given(span=SPANS, grow=st.booleans(), byte=st.sampled_from([b"\x00", b"\xff", b" ", b"\n", b"["]))
def test_runs_of_one_byte(tmp_path: Any, span: tuple[int, int], grow: bool, byte: bytes) -> None:
    """As a crash of the machine leaves them: a block of zeros over the end of a file, or within it."""
    run = byte * (span[1] - span[0])
    look(tmp_path, WHOLE[: span[0]] + run + WHOLE[span[0] if grow else span[1] :])


@examples(40)
@given(span=SPANS, at=st.integers(0, len(WHOLE)), times=st.integers(1, 3))
def test_doubled_chunks(tmp_path: Any, span: tuple[int, int], at: int, times: int) -> None:
    look(tmp_path, WHOLE[:at] + WHOLE[span[0] : span[1]] * times + WHOLE[at:])


@examples(40)
@given(at=st.integers(0, len(WHOLE)), junk=st.binary(min_size=1, max_size=200))
def test_inserted_bytes(tmp_path: Any, at: int, junk: bytes) -> None:
    """Invalid UTF-8 included."""
    look(tmp_path, WHOLE[:at] + junk + WHOLE[at:])


@examples(20)
@given(
    at=st.integers(0, len(JOURNAL)), size=st.integers(1, 40_000), char=st.sampled_from(["x", "[", '{"a":', '"', "\\"])
)
def test_over_long_and_deeply_nested_lines(tmp_path: Any, at: int, size: int, char: str) -> None:
    import driftscope._journal_reader as reader

    bad = (char * size)[:40_000].encode()
    lines = [*JOURNAL[:at], bad, *JOURNAL[at:]]
    limit = reader.MAX_LINE_BYTES
    reader.MAX_LINE_BYTES = 8192
    try:
        run, _ = read(tmp_path, b"\n".join(lines) + b"\n")
    finally:
        reader.MAX_LINE_BYTES = limit
    assert run is not None
    assert len(run.steps) + len(run.alerts) + len(run.notes) == len(JOURNAL)
    assert f"1 damaged line skipped (line {at + 1})." in run.problems
    survives(tmp_path, run)


@pytest.mark.parametrize("depth", [900, 1100, 5000, 100_000])
def test_a_record_with_deep_nesting_inside(tmp_path: Any, depth: int) -> None:
    """JSON that parses but is too deep for what comes after it."""
    data = json.loads(JOURNAL[0])
    line = json.dumps({**data, "head": {"x": 0}}).replace('"x": 0', '"x": ' + "[" * depth + "]" * depth).encode()
    run = look(tmp_path, line + b"\n" + WHOLE)
    assert run is not None
    assert len(run.steps) in (5, 6)


@pytest.mark.parametrize("end", [b"\r\n", b"\n\n", b" \n", b"\n\t\n"])
def test_line_ends_of_other_tools(tmp_path: Any, end: bytes) -> None:
    run, _ = read(tmp_path, WHOLE.replace(b"\n", end))
    assert run is not None
    assert len(run.steps) + len(run.alerts) + len(run.notes) == len(JOURNAL)
    assert run.problems == []
    survives(tmp_path, run)


def test_a_byte_order_mark(tmp_path: Any) -> None:
    run, _ = read(tmp_path, b"\xef\xbb\xbf" + WHOLE, b"\xef\xbb\xbf" + INFO.encode())
    assert run is not None
    assert len(run.steps) + len(run.alerts) + len(run.notes) >= len(JOURNAL) - 1
    survives(tmp_path, run)


@examples(30)
@given(cut=st.integers(0, len(WHOLE)), newline=st.booleans(), crlf=st.booleans())
def test_two_journals_in_one_file(tmp_path: Any, cut: int, newline: bool, crlf: bool) -> None:
    other = b"".join(line + (b"\r\n" if crlf else b"\n") for line in OTHER)
    run = look(tmp_path, WHOLE[:cut] + (b"\n" if newline else b"") + other)
    assert run is not None


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**20, 10**25), st.floats(allow_nan=True),
    st.text(max_size=30),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.sampled_from(["9" * 400, "-" * 10, "\x1b[31m", "</script>", "\ud800", 1e308, -1e308, 1e-320, 2**63, -(2**70)]),
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON object stands."""
    if isinstance(data, dict):
        return [p for k, v in data.items() for p in [(*path, k), *places(v, (*path, k))]]
    if isinstance(data, list):
        return [p for i, v in enumerate(data) for p in [(*path, i), *places(v, (*path, i))]]
    return []


FIELDS = [(number, place) for number, line in enumerate(JOURNAL) for place in places(json.loads(line))]


@examples(150)
@given(where=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_in_any_field(tmp_path: Any, where: tuple[int, tuple[Any, ...]], value: Any) -> None:
    number, place = where
    data = json.loads(JOURNAL[number])
    _put(data, place, value)
    lines = [*JOURNAL[:number], json.dumps(data).encode(), *JOURNAL[number + 1 :]]
    look(tmp_path, b"\n".join(lines) + b"\n")


@examples(60)
@given(where=st.sampled_from(FIELDS), drop=st.booleans())
def test_fields_that_are_missing_or_renamed(tmp_path: Any, where: tuple[int, tuple[Any, ...]], drop: bool) -> None:
    number, place = where
    data = json.loads(JOURNAL[number])
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    value = holder.pop(place[-1])
    if not drop and isinstance(holder, dict):
        holder[f"{place[-1]}2"] = value
    lines = [*JOURNAL[:number], json.dumps(data).encode(), *JOURNAL[number + 1 :]]
    look(tmp_path, b"\n".join(lines) + b"\n")


@examples(60)
@given(
    where=st.sampled_from([(n, p) for n, p in FIELDS if not isinstance(p[-1], int)]),
    token=st.sampled_from(
        ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" * 5000, "1e-999", "0" * 50 + "1", "1.", "-"]
    ),
)
def test_numbers_that_json_does_not_have(tmp_path: Any, where: tuple[int, tuple[Any, ...]], token: str) -> None:
    number, place = where
    data = json.loads(JOURNAL[number])
    _put(data, place, "@@@")
    line = json.dumps(data).replace('"@@@"', token).encode()
    run, _ = read(tmp_path, b"\n".join([*JOURNAL[:number], line, *JOURNAL[number + 1 :]]) + b"\n")
    survives(tmp_path, run)
    if run is not None:
        read_back = iter([json.dumps(encode(r)).encode() for r in iter_records(tmp_path)])
        for undamaged in (*JOURNAL[:number], *JOURNAL[number + 1 :]):
            assert any(undamaged == candidate for candidate in read_back)


def at(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        data = data[key]
    return data


NUMBERS = [
    p for n, p in FIELDS if n == 0 and p != ("schema",) and isinstance(at(json.loads(JOURNAL[0]), p), int | float)
]


@pytest.mark.parametrize("place", NUMBERS, ids=lambda place: ".".join(map(str, place)))
def test_integers_of_any_size(tmp_path: Any, place: tuple[Any, ...]) -> None:
    """A number of 400 digits anywhere in a record: ``check``, ``report`` and ``compare`` go on."""
    data = json.loads(JOURNAL[0])
    _put(data, place, 10**400)
    run, _ = read(tmp_path, b"\n".join([json.dumps(data).encode(), *JOURNAL[1:]]) + b"\n")
    assert run is not None
    for command in (["check", "--json"], ["report", "--out", str(tmp_path / "report.html")], ["compare"]):
        runs = [str(tmp_path)] * (2 if command[0] == "compare" else 1)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([command[0], *runs, *command[1:]])
        assert code in (0, 1), err.getvalue()
        assert str(10**400) not in out.getvalue()


@examples(60)
@given(
    place=st.sampled_from(places(json.loads(INFO))),
    value=VALUES,
    cut=st.integers(0, len(INFO)),
    bits=st.integers(0, 7),
)
def test_a_damaged_run_json_costs_only_itself(
    tmp_path: Any, place: tuple[Any, ...], value: Any, cut: int, bits: int
) -> None:
    data = json.loads(INFO)
    _put(data, place, value)
    flipped = bytearray(INFO.encode())
    flipped[min(cut, len(flipped) - 1)] ^= 1 << bits
    for content in (
        json.dumps(data).encode(),
        INFO.encode()[:cut],
        bytes(flipped),
        INFO.encode()[:cut] + b"\x00" * 40,
    ):
        run, why = read(tmp_path, WHOLE, content)
        survives(tmp_path, run)
        if run is None:
            assert "schema version" in why
        else:
            assert len(run.steps) + len(run.alerts) + len(run.notes) == len(JOURNAL)


def _put(data: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        data = data[key]
    data[place[-1]] = value
