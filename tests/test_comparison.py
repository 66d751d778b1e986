"""Runs side by side: what is kept of a run, what differs, and the edges."""

from __future__ import annotations

import gc
import math
import pickle
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from driftscope.comparison import FIGURES, Series, compare, load
from driftscope.comparison.loading import DRAWN_POINTS, JUDGED_POINTS, thin
from driftscope.comparison.model import MARKED
from driftscope.errors import RecordError
from driftscope.journal import JournalWriter
from driftscope.records import RanksRecord
from tests.record_factory import alert, honest_ratio, info, note, seed_step, step, truncated_ratio


def write(directory: Path, *records, **fields) -> Path:
    with JournalWriter(directory) as journal:
        journal.write_info(info(**{"run_id": directory.name, "status": "finished", **fields}))
        for record in records:
            journal.write(record)
    return directory


def series(values, start=1) -> Series:
    return Series(tuple(range(start, start + len(values))), tuple(values))


def honest(n=24, *, seed=0, norm=0.3, **fields):
    rng = random.Random(seed)
    return [
        step(
            step=s, ratio=1 + rng.gauss(0, 1e-7), is_ratio=honest_ratio(), **{"live_grad_norm": norm *
            rng.lognormvariate(0, 0.2), **fields}
        )
        for s in range(1, n + 1)
    ]  # fmt: skip


def broken(n=24, *, seed=0):
    rng = random.Random(seed)
    return [seed_step(s, ratio=118 * rng.lognormvariate(0, 0.2), live_grad_norm=31.0) for s in range(1, n + 1)]


def marks(comparison, index=1):
    return {row.figure.id: row.cells[index].mark for row in comparison.figures}


def marked(comparison):
    return {
        (comparison.runs[i].label, row.figure.id)
        for row in comparison.figures
        for i, cell in enumerate(row.cells)
        if cell.mark in MARKED
    }


def changes(comparison, index=1):
    return {row.rule: row.cells[index].change for row in comparison.findings}


# What a column keeps.


def test_a_column_holds_thinned_series_and_no_records(tmp_path):
    path = write(tmp_path / "long", *honest(2500))
    column = load(path)
    assert column.records == 2500
    assert all(len(s) <= JUDGED_POINTS for s in column.series.values())
    assert all(len(s) <= DRAWN_POINTS for s in column.lines.values())
    assert len(column.attributed) <= JUDGED_POINTS
    assert b"StepRecord" not in pickle.dumps(column)


def test_many_runs_need_the_memory_of_one(tmp_path):
    paths = [write(tmp_path / f"run{i}", *honest(150, seed=i)) for i in range(6)]

    def peak(chosen):
        gc.collect()
        tracemalloc.start()
        columns = [load(path) for path in chosen]
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(columns) == len(chosen)
        return size

    load(paths[0])  # what is imported and cached on first use
    one = peak(paths[:1])
    kept = peak(paths) - one
    assert kept < 0.5 * one


def test_thinning_keeps_the_extremes():
    values = [1.0] * 50_000
    values[12_345], values[40_000] = 99.0, 0.01
    line = thin(series(values))
    assert len(line) <= DRAWN_POINTS
    assert {99.0, 0.01} <= set(line.values)
    assert (line.steps[0], line.steps[-1]) == (1, 50_000)


def test_the_value_of_a_step_is_the_median_of_its_records(tmp_path):
    records = [step(step=1, micro_step=m, ratio=r) for m, r in enumerate((1.0, 2.0, 9.0))]
    column = load(write(tmp_path / "run", *records, step(step=2, micro_step=0, ratio=math.nan)))
    assert column.series["gap"] == Series((1,), (2.0,))
    assert column.scalars["worst_gap"] == 9.0


# Edges.


def test_an_empty_or_foreign_run_raises_what_reading_raises(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b"")
    with pytest.raises(RecordError, match="is empty"):
        load(tmp_path)


def test_labels_are_the_shortest_that_tell_runs_apart(tmp_path):
    names = ["a/x/run", "b/x/run", "c/other"]
    columns = [load(write(tmp_path / name, *honest(2), run_id=name)) for name in names]
    columns.append(load(tmp_path / "c" / "other" / "records.jsonl"))
    assert [r.label for r in compare(columns).runs] == ["a/x/run", "b/x/run", "other", "other (2)"]


def test_a_torn_running_run_is_compared_and_said_to_be_one(tmp_path):
    whole = write(tmp_path / "whole", *honest(20))
    running = write(tmp_path / "running", *honest(12, seed=1), status="running")
    with (running / "records.jsonl").open("ab") as stream:
        stream.write(b'{"kind": "step", "sch')
    comparison = compare([load(whole), load(running)])
    assert marked(comparison) == set()
    notes = " ".join(comparison.notes)
    assert "running: The last line (13) is incomplete" in notes
    assert "still running, or cut off" in notes
    assert "end at different steps" in notes


def test_runs_of_different_lengths_are_compared_where_both_were(tmp_path):
    grows = [step(step=s, is_ratio=honest_ratio(), live_grad_norm=0.3 if s <= 20 else 30.0) for s in range(1, 101)]
    comparison = compare([load(write(tmp_path / "short", *honest(20))), load(write(tmp_path / "long", *grows))])
    cell = next(row for row in comparison.figures if row.figure.id == "live_grad_norm").cells[1]
    assert cell.value == 30.0
    assert (cell.pairs, cell.mark) == (20, "within")
    assert cell.change == pytest.approx(1.0, rel=0.15)


def test_runs_without_steps_in_common_are_too_few(tmp_path):
    late = [r.model_copy(update={"step": r.step + 100}) for r in honest(20)]
    comparison = compare([load(write(tmp_path / "a", *honest(20))), load(write(tmp_path / "b", *late))])
    assert set(marks(comparison).values()) <= {"too_few", "not_judged", "unavailable"}
    assert "too few" in comparison.headline + " ".join(comparison.sentences)


def test_without_run_json_the_configuration_is_unavailable_not_the_same(tmp_path):
    paths = [write(tmp_path / name, *honest(10)) for name in "ab"]
    (paths[1] / "run.json").unlink()
    comparison = compare([load(p) for p in paths])
    assert comparison.settings == ()
    assert any("unavailable for b" in s for s in comparison.sentences)
    assert not any("configured the same" in s for s in comparison.sentences)


def test_settings_differ_by_value_not_by_writing(tmp_path):
    trainer = {"top_p": 1, "beta": 0.0, "kwargs": {"use_reentrant": False, "empty": {}}, "seed": 1}
    other = {"top_p": 1.0, "beta": 0.1, "kwargs": {"use_reentrant": True, "empty": {}}, "seed": 1, "new": None}
    runs = [
        load(write(tmp_path / name, *honest(2), trainer=t, versions={"trl": v}, settings={"run_dir": name}))
        for name, t, v in (("a", trainer, "0.27.2"), ("b", other, "1.16.0"))
    ]
    rows = {row.name: row.values for row in compare(runs).settings}
    assert rows == {
        "trl": ("0.27.2", "1.16.0"), "beta": ("0", "0.1"), "kwargs.use_reentrant": ("no", "yes"),
        "new": (None, "none"),
    }  # fmt: skip


def test_the_ranks_of_a_run_are_counted(tmp_path):
    eight = [r.model_copy(update={"ranks": RanksRecord(processes=8)}) for r in honest(10)]
    one = load(write(tmp_path / "one", *honest(10), spec={"num_processes": 1}))
    comparison = compare([one, load(write(tmp_path / "eight", *eight, spec={"num_processes": 8}))])
    row = next(row for row in comparison.figures if row.figure.id == "processes")
    assert [cell.value for cell in row.cells] == [1, 8]
    assert [(r.name, r.values) for r in comparison.settings] == [("num_processes", ("1", "8"))]
    assert comparison.replicates == ()


def test_a_gap_of_other_paths_is_not_set_against_this_one(tmp_path):
    own = load(write(tmp_path / "own", *honest(20)))
    other = load(write(tmp_path / "other", *(step(step=s, candidate="corrected", ratio=5.0) for s in range(1, 21))))
    found = marks(compare([own, other]))
    assert found["gap"] == found["worst_gap"] == found["cosine"] == "other_paths"


def test_a_cause_that_was_sought_and_not_found_has_factor_one(tmp_path):
    runs = [load(write(tmp_path / "broken", *broken())), load(write(tmp_path / "honest", *honest()))]
    row = next(row for row in compare(runs).figures if row.figure.id == "cause.is_correction")
    assert [cell.value for cell in row.cells] == [88.0, 1.0]
    assert row.cells[1].mark == "better"
    silent = [r.model_copy(update={"unexplained": None, "causes": []}) for r in honest()]
    runs[1] = load(write(tmp_path / "silent", *silent))
    row = next(row for row in compare(runs).figures if row.figure.id == "cause.is_correction")
    assert (row.cells[1].value, row.cells[1].mark) == (None, "unavailable")


def test_zero_against_something_is_a_difference_without_a_factor(tmp_path):
    masked = truncated_ratio(mean=0.0)
    zero = [step(step=s, is_ratio=masked) for s in range(1, 21)]
    comparison = compare([load(write(tmp_path / "honest", *honest(20))), load(write(tmp_path / "zero", *zero))])
    cell = next(row for row in comparison.figures if row.figure.id == "is_ratio").cells[1]
    assert (cell.value, cell.change, cell.mark) == (0.0, None, "worse")
    assert comparison.runs[1].dropped == {"is_ratio": 20}
    assert "is_ratio" not in comparison.runs[1].lines


def test_rounding_is_no_difference(tmp_path):
    def at(residual, error):
        paths = step().paths
        paths["liger"] = paths["liger"].model_copy(update={"coef_error": error})
        return [step(step=s, residual=residual, paths=paths) for s in range(1, 21)]

    runs = [load(write(tmp_path / n, *at(*v))) for n, v in
            (("fp32", (3e-7, 1e-8)), ("fp32b", (9e-6, 4e-7)), ("bf16", (4e-3, 5e-3)))]  # fmt: skip
    comparison = compare(runs)
    assert marks(comparison, 1)["residual"] == marks(comparison, 1)["coef_error"] == "within"
    assert marks(comparison, 2)["residual"] == marks(comparison, 2)["coef_error"] == "worse"


def test_a_gap_within_the_measured_noise_floor_is_no_difference(tmp_path):
    def at(ratio, noise):
        return [step(step=s, ratio=ratio, noise=noise) for s in range(1, 21)]

    for noise, mark in ((0.02, "within"), (1e-6, "worse")):
        runs = [load(write(tmp_path / f"{n}{noise}", *at(r, noise))) for n, r in (("a", 1.0), ("b", 1.03))]
        assert marks(compare(runs))["gap"] == mark


def test_what_lies_between_seeds_is_not_marked(tmp_path):
    """Medians that a seed alone moves by a third: against them, another third is nothing."""

    def run(name, norm, seed, **trainer):
        records = [step(step=s, is_ratio=honest_ratio(), live_grad_norm=norm) for s in range(1, 31)]
        return load(write(tmp_path / name, *records, trainer={"seed": seed, **trainer}))

    base, other, changed = run("a", 0.30, 1), run("b", 0.40, 2), run("c", 0.38, 1, top_p=0.9)
    assert marks(compare([base, changed]))["live_grad_norm"] == "differs"
    comparison = compare([base, changed, other])
    assert comparison.replicates == ((0, 2),)
    assert marked(comparison) == {("b", "live_grad_norm")}  # a run is no yardstick of itself
    assert "Same configuration but for seed and length: a, b." in " ".join(comparison.sentences)
    far = run("d", 4.0, 1, top_p=0.8)
    assert ("d", "live_grad_norm") in marked(compare([base, far, other]))
    third = run("e", 0.45, 3)
    assert marked(compare([base, other, third])) == {("e", "live_grad_norm")}


def test_findings_are_new_gone_changed_or_the_same(tmp_path):
    base = [alert("DS101", "warning", s) for s in range(1, 21)] + [alert("DS106", "info", 30)]
    mine = [alert("DS101", "critical", s) for s in range(1, 21)] + [alert("DS105", "warning", 3)]
    runs = [
        load(write(tmp_path / "a", *honest(40), *base)),
        load(write(tmp_path / "b", *honest(20), *mine)),
        load(write(tmp_path / "c", *honest(60), alert("DS104", "info", 50))),
    ]
    comparison = compare(runs)
    cells = {row.rule: row.cells for row in comparison.findings}
    assert cells["DS101"][1].change == "worse"
    assert (cells["DS105"][1].change, cells["DS105"][1].chance) == ("new", True)
    assert (cells["DS106"][1].change, cells["DS106"][1].late) == ("unknown", True)  # b ended before step 30
    assert (cells["DS101"][2].change, cells["DS101"][2].chance) == ("gone", False)
    assert (cells["DS104"][2].change, cells["DS104"][2].late) == ("new", True)
    assert [row.rule for row in comparison.findings][:2] == ["DS101", "DS105"]
    assert "new findings: DS105 (on so few steps that it may be chance)" in comparison.sentences[0]


def test_a_run_in_which_nothing_was_measured_is_neither_clean_nor_better(tmp_path):
    light = [step(step=s, tier="light", gap=None, paths={}, residual=None, unexplained=None) for s in range(1, 21)]
    runs = [load(write(tmp_path / "broken", *broken())), load(write(tmp_path / "light", *light, note()))]
    comparison = compare(runs)
    assert "nothing was measured in light" in comparison.headline
    assert changes(comparison)["DS101"] == "unknown"
    assert not marked(comparison)
    assert "Nothing was measured in any of the 2 runs" in compare([runs[1], runs[1]]).headline


def test_unavailable_signals_are_told(tmp_path):
    records = honest(10, unavailable={"kept_mass": "top_k is not known"})
    comparison = compare([load(write(tmp_path / "a", *honest(10))), load(write(tmp_path / "b", *records))])
    assert any("b: unavailable" in n and "top_k is not known" in n for n in comparison.notes)


def test_fifty_runs_are_compared(tmp_path):
    good = load(write(tmp_path / "good", *honest(40)))
    bad = load(write(tmp_path / "bad", *broken(40)))
    columns = [
        replace(bad if i % 10 == 3 else good, path=tmp_path / f"run{i:02d}", run_id=f"id{i}") for i in range(50)
    ]
    comparison = compare(columns)
    assert comparison.headline.startswith("45 of 50 runs have no warning")
    assert {label for label, _ in marked(comparison)} == {f"run{i:02d}" for i in range(3, 50, 10)}
    assert "5 of 49 runs differ" in comparison.sentences[0]
    assert all(len(s) < 700 for s in comparison.sentences)


def test_every_figure_says_what_it_is():
    assert len({f.id for f in FIGURES}) == len({f.label for f in FIGURES}) == len(FIGURES)
    for figure in FIGURES:
        assert figure.off_scale(figure.on_scale(2.5)) == pytest.approx(2.5)
        assert (figure.get is None) <= (not figure.judged)
