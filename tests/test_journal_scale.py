"""Reading a run of any size: as reading it whole, in memory that does not grow, and never from a wrong cache."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftscope.errors import RecordError
from driftscope.journal import encode, read_run
from driftscope.reading import scan, summarise
from driftscope.reading.columns import STRETCHES, Stretches
from driftscope.reading.digest import EXACT, RELATIVE_ERROR, Digest, StepSet
from driftscope.records import StepRecord
from driftscope.thinning import FULL_EVERY, FULL_UNTIL, Thinner, slim, thin
from driftscope.verdict import judge
from tests.dashboards.simulated import step_record
from tests.long_runs import long_run, outcome, random_records, write
from tests.record_factory import alert, honest_ratio, seed_step, step


@pytest.mark.parametrize("seed", range(60))
def test_streaming_and_whole_reading_agree(tmp_path, seed):
    directory = write(tmp_path, random_records(seed), seed)
    whole = outcome(read_run(directory))
    for processes in (1, 2) if seed % 10 == 0 else (1,):
        assert outcome(summarise(directory, processes)) == whole


@pytest.mark.parametrize("content", ["", "\n\n", "x\ny\n", '{"kind":"step"', '{"kind":"step","schema":7}\n',
                                     '{"kind":"later","schema":1}\n'])  # fmt: skip
def test_a_file_that_is_no_run_is_refused_alike(tmp_path, content):
    (tmp_path / "records.jsonl").write_text(content)
    try:
        read_run(tmp_path)
        expected = None
    except RecordError as error:
        expected = str(error)
    if expected is None:
        assert summarise(tmp_path).records == 0
    else:
        with pytest.raises(RecordError) as caught:
            summarise(tmp_path)
        assert str(caught.value) == expected
    with pytest.raises(RecordError, match="does not exist"):
        summarise(tmp_path / "nothing")


def test_an_unknown_schema_is_named_by_its_line_in_whatever_part_it_stands(tmp_path):
    records = [step(step=n, is_ratio=honest_ratio()) for n in range(1, 40)]
    directory = write(tmp_path, records)
    with (directory / "records.jsonl").open("a") as stream:
        stream.write('{"kind":"step","schema":2,"step":40}\n')
    for processes in (1, 2):
        with pytest.raises(RecordError, match=r"line 40: schema version 2 is unknown"):
            summarise(directory, processes)


def test_a_process_that_fails_is_stood_in_for(tmp_path, monkeypatch):
    directory = write(tmp_path, random_records(3))
    monkeypatch.setattr(scan, "_CODE", "raise SystemExit(3)")
    assert outcome(summarise(directory, 2)) == outcome(read_run(directory))
    monkeypatch.setattr(scan, "_CODE", "print('no sums')")
    assert outcome(summarise(directory, 2)) == outcome(read_run(directory))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert outcome(summarise(directory, 2)) == outcome(read_run(directory))


def test_only_records_that_nobody_judged_are_judged_again(tmp_path):
    judged, unjudged = seed_step(1, judged=True), seed_step(2)
    for records, found in (([judged], set()), ([unjudged], {"DS101", "DS102", "DS201"})):
        run = read_run(write(tmp_path, records))
        rules = {f.rule for f in judge(run).findings} - {"DS111"}  # that one is of run.json
        assert found <= rules
        assert bool(found) == bool(rules)
        assert judge(summarise(tmp_path)) == judge(run)


def test_an_alert_that_follows_is_not_counted_twice(tmp_path):
    records = [seed_step(1), seed_step(2), alert("DS101", "critical", 1), alert("DS101", "critical", 2)]
    for run in (read_run(write(tmp_path, records)), summarise(tmp_path)):
        found = next(f for f in judge(run).findings if f.rule == "DS101")
        assert (found.count, found.title) == (2, "T")


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60),
    repeats=st.integers(1, 400),
    cut=st.integers(0, 60),
)
def test_a_digest_is_exact_for_few_values_and_within_its_error_for_many(values, repeats, cut):
    parts = [values[:cut] * repeats, values[cut:] * repeats]
    digest = Digest()
    for part in parts:
        one = Digest()
        one.extend(part)
        digest.merge(one)
    every = [*parts[0], *parts[1]]
    assert digest.count == len(every)
    assert digest.extremes() == (min(every), max(every))
    assert digest.exact == (len(every) <= EXACT)
    ordered = sorted(every)
    middle = [ordered[(len(every) - 1) // 2], ordered[len(every) // 2]]
    slack = 0 if digest.exact else 2.1 * RELATIVE_ERROR * max(map(abs, middle)) + 1e-18
    assert abs(digest.median() - statistics.median(every)) <= slack
    assert digest.total == pytest.approx(sum(every), rel=1e-9, abs=1e-3)
    assert digest.not_positive == sum(v <= 0 for v in every)


def test_a_digest_of_a_constant_is_that_constant():
    digest = Digest()
    digest.repeat(1.0, 10 * EXACT)
    assert digest.median() == 1.0
    digest.add_array(np.full(3 * EXACT, 1 + 1e-7))
    assert digest.median() == pytest.approx(1.0, abs=1e-7)


@given(st.lists(st.integers(-(10**12), 10**12)), st.lists(st.integers(0, 9000)))
def test_a_step_set_is_a_set(one, other):
    sets = [StepSet(), StepSet()]
    for steps, found in zip((one, other), sets, strict=True):
        for number in steps:
            found.add(number)
    sets[0].merge(sets[1])
    assert len(sets[0]) == len({*one, *other})
    assert all(number in sets[0] for number in (*one, *other))
    assert (7 in sets[0]) == (7 in one or 7 in other)


def test_stretches_cover_the_run_and_can_be_joined():
    stretches = Stretches.over(11, 1000)
    assert stretches.of(11) == 0
    assert stretches.of(1000) < STRETCHES
    assert stretches.reaches(1000)
    wide = stretches.doubled()
    assert all(wide.of(s) == stretches.of(s) // 2 for s in range(11, 1001, 7))


def test_every_extreme_and_every_first_and_last_alert_is_kept(tmp_path):
    spikes = {3001: 4321.0, 5001: 0.0001, 7007: 99.5, 2: 77.0, 9999: 55.5}
    run = summarise(long_run(tmp_path, 10_000, spikes), 2)
    kept = {(record.step, record.micro_step): record for record in run.kept()}
    assert len(kept) < 6000
    assert kept[3001, 0].gap.grad_norm_ratio == 4321.0
    assert kept[5001, 0].gap.grad_norm_ratio == 0.0001
    assert kept[7007, 3].live_grad_norm == 99.5
    assert {1, 2, 21, 41, 9941, 9961, 9981, 9999, 10_000} <= {number for number, _ in kept}
    assert all((3001, micro) in kept for micro in range(4))
    assert run.figures["gap.grad_norm_ratio"].extremes() == (0.0001, 4321.0)
    assert run.alerts.rules["DS101"].count == run.alerts.rules["DS101"].distinct == 500
    assert sum(sum(found) for found in zip(*run.alerts.rules["DS101"].by_stretch, strict=True)) == 500


def test_the_sums_of_a_long_run_are_those_of_its_records(tmp_path):
    directory = long_run(tmp_path, 3000, {})
    run, whole = summarise(directory, 2), read_run(directory)
    ratios = [s.gap.grad_norm_ratio for s in whole.steps if s.gap is not None]
    digest = run.figures["gap.grad_norm_ratio"]
    assert digest.count == len(ratios)
    assert digest.median() == statistics.median(ratios)
    times = [s.step_ms for s in whole.steps if s.step_ms is not None]
    assert run.figures["step_ms"].count == len(times)
    assert run.figures["step_ms"].total == pytest.approx(sum(times))
    assert run.steps == 3000
    assert judge(run).level == judge(whole).level == "critical"
    assert judge(run).findings == judge(whole).findings


def test_light_records_read_back_as_they_were():
    for micro in range(4):
        record = step_record(3, micro).model_copy(update={"tier": "light", "time": 1795273288.85267})
        assert StepRecord.model_validate(slim(encode(record), exact=True)) == record
        rounded = StepRecord.model_validate(slim(encode(record)))
        assert rounded.time == 1795273288.853
        assert rounded.paths["liger"].loss == pytest.approx(record.paths["liger"].loss, rel=1e-8)
        assert rounded.tokens == record.tokens


def test_what_a_record_promises_stays_when_it_is_slimmed():
    bare = StepRecord(step=1, micro_step=0, live="liger", tier="light", paths={"liger": {}})
    data = slim(encode(bare))
    promised = "kind schema step micro_step rank live paths live_grad_norm gap is_ratio causes unexplained residual"
    assert {*promised.split(), "overhead_ms"} <= set(data)
    assert set(data["paths"]["liger"]) >= {"loss", "hidden_grad_norm", "param_grad_norm", "normalizer", "coef_error"}
    assert StepRecord.model_validate(data) == bare
    assert len(json.dumps(data)) < 0.7 * len(json.dumps(encode(bare)))


def test_later_steps_are_thinned_but_for_every_tenth_and_fresh_alarms():
    record = step_record(500, 1)
    assert thin(record, FULL_UNTIL - 1, False) is record
    assert thin(record, FULL_UNTIL + 1, True) is record
    assert thin(record, FULL_UNTIL + FULL_EVERY, False) is record
    before = record.model_copy(deep=True)
    short = thin(record, FULL_UNTIL + 1, False)
    assert record == before
    assert (short.scatter, short.mismatch, short.is_ratio.raw.quantiles) == ([], None, {})
    assert short.is_ratio.raw.mean == record.is_ratio.raw.mean
    last = thin(step_record(500, 3), FULL_UNTIL + 1, False)
    assert last.mismatch.histogram == last.mismatch.by_decile == []
    assert last.mismatch.log_difference == step_record(500, 3).mismatch.log_difference
    figures = {"gap", "paths", "causes", "unexplained", "residual", "drift", "canary", "live_grad_norm"}
    assert short.model_dump(include=figures) == record.model_dump(include=figures)


def test_the_thinner_counts_steps_of_each_tier_apart():
    thinner, records = (
        Thinner(),
        {tier: step_record(1, 3).model_copy(update={"tier": tier}) for tier in ("light", "deep")},
    )
    written = []
    for number in range(1, 2 * FULL_UNTIL + 20):
        for tier in ("light", "deep", "deep") if number % 2 else ("light",):
            record = records[tier].model_copy(update={"step": number})
            data = thinner.slim(record, encode(thinner.thin(record)))
            assert StepRecord.model_validate(data).step == number
            written.append((number, tier, bool(data.get("scatter")), data.get("mismatch", "left out")))
    full = {tier: [n for n, t, scatter, _ in written if t == tier and scatter] for tier in ("light", "deep")}
    assert full["deep"] == [n for n in range(1, 2 * FULL_UNTIL + 20, 2) if n // 2 < FULL_UNTIL or n // 2 % 10 == 0
                            for _ in (0, 1)]  # fmt: skip
    assert full["light"][: FULL_UNTIL + 2] == [*range(1, FULL_UNTIL + 1), FULL_UNTIL + 1, FULL_UNTIL + 11]
    early, later = (step_record(n, 3) for n in (1, 2))
    thinner = Thinner()
    assert thinner.slim(early, encode(thinner.thin(early))) == encode(early)
    thinner._index["analysed"] = FULL_UNTIL
    assert len(str(thinner.slim(later, encode(thinner.thin(later))))) < 0.5 * len(str(encode(later)))


LIMIT = """
import sys, time
from driftscope.reading import summarise
from driftscope.verdict import judge
begun = time.process_time()
run = summarise(sys.argv[1], processes=1, cached=False)
level = judge(run).level
with open("/proc/self/status") as status:  # ru_maxrss would begin with what the parent had at the fork
    peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(level, run.records, peak_kb // 1024, time.process_time() - begun)
"""


def test_twenty_thousand_steps_in_seconds_and_bounded_memory(tmp_path):
    sizes = {}
    for steps in (2_000, 20_000):
        directory = long_run(tmp_path / str(steps), steps, {})
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", LIMIT, str(directory)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()
        assert (out[0], int(out[1])) == ("critical", steps * 23 // 20)
        sizes[steps] = int(out[2])
        assert float(out[3]) < 20
    assert sizes[20_000] < 200
    assert sizes[20_000] < sizes[2_000] + 60
