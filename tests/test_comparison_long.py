"""Runs too long to be held are compared on evenly spaced windows: the same steps of both, and the same words."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from driftscope import reading
from driftscope.comparison.loading import JUDGED_POINTS, load
from driftscope.comparison.sampling import sample
from tests.long_runs import long_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_run(tmp_path_factory.mktemp("long"), 4_000, {})


def test_windows_are_even_whole_and_bounded(run: Path) -> None:
    records = run / "records.jsonl"
    for limit in (8, 50, 10_000):
        found = sample(records, limit)
        analysed = [s.step for s in found.steps if s.tier != "light"]
        kept = sorted(set(analysed))
        assert found.measured == 200
        assert len(kept) == 200 if limit > 200 else limit <= len(kept) <= 2 * limit + 1
        assert len({b - a for a, b in pairwise(kept)}) == 1
        assert all(analysed.count(step) == 4 for step in kept)  # every micro-batch of a kept window
        light = sorted({s.step for s in found.steps if s.tier == "light"})
        assert len(light) <= 2 * limit + 1
        assert kept[0] == 1


def test_a_streamed_run_compares_like_the_one_in_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(run)
    monkeypatch.setattr(reading.summary, "STREAM_BYTES", 0)
    streamed = load(run)
    assert (streamed.records, streamed.measured_steps) == (whole.records, whole.measured_steps)
    assert (streamed.level, streamed.findings) == (whole.level, whole.findings)
    assert streamed.pair == whole.pair
    assert len(whole.series["gap"].steps) <= JUDGED_POINTS
    for name, series in whole.series.items():
        mine = dict(zip(streamed.series[name].steps, streamed.series[name].values, strict=True))
        shared = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if step in mine]
        assert shared, name
        assert all(mine[step] == value for step, value in shared), name


def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    directory = long_run(tmp_path, 40, {})
    records = directory / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    lines[1:1] = [b"\x00\xff not a record\n", b'{"kind":"step","schema":1,"step":"x"}\n', b'{"kind":"step","step":3']
    records.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    found = sample(records, 1000)
    assert {s.step for s in found.steps} <= set(range(1, 41))
    assert len(found.steps) >= 40
    assert json.loads(lines[0])["step"] == 1
