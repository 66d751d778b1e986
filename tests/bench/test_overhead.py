"""The overhead benchmark: neighbours are compared rightly, time is booked on the right stage, a sweep survives."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from driftscope.config import DriftscopeConfig

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import stages  # noqa: E402
from paired import Plan, Step, compare, composed, interval, share, under_budget  # noqa: E402
from stages import REST, Timer, by_stage, innermost  # noqa: E402

TINY = ["--cpu", "--tokens", "16", "--batch", "2", "--accumulation", "2", "--cycles", "2"]

# -- which steps are awake ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(2, 5), Plan(1, 1), Plan(2, 4, cycle=2)])
def test_a_plan_gives_every_awake_step_that_counts_asleep_neighbours(plan):
    counted = [i for i in range(plan.first, plan.steps) if plan.awake(i)]
    assert len(counted) == plan.cycles
    timed = range(plan.steps - 1)  # the last one has no end
    for i in counted:
        assert not plan.awake(i - 1)
        assert all(not plan.awake(i + k) and i + k in timed for k in range(1, plan.cycle))
    assert [plan.awake(i) for i in range(plan.first)] == [False, False] + [True] * plan.warm


def test_a_run_may_stop_where_two_cycles_and_their_neighbours_are_timed():
    plan = Plan(2, 20)
    stop = next(i for i in range(plan.steps) if plan.complete(i))
    rows = [Step(i, plan.awake(i), 100.0) for i in range(stop)]  # the step in hand has no end
    assert compare(rows, plan)["overhead"]["count"] == 2
    assert compare(rows, plan)["after"]["count"] == 2


# -- what they cost -------------------------------------------------------------------------------------------------


def rows_of(plan, cost, after=0.0, drift=0.0, noise=0.0, seed=0, **memory):
    """Timed steps of 100 ms that drift, with awake ones ``cost`` dearer and the one after each ``after``."""
    chance, rows = random.Random(seed), []
    for i in range(plan.steps - 1):
        awake, late = plan.awake(i), i > 0 and plan.awake(i - 1) and not plan.awake(i)
        ms = 100.0 + drift * i + (cost if awake else 0.0) + (after if late else 0.0) + chance.gauss(0, noise)
        rows.append(Step(i, awake, ms, **{k: v(awake) for k, v in memory.items()}))
    return rows


def test_a_cost_is_found_beside_a_drift_of_the_machine():
    plan = Plan(2, 40)
    found = compare(rows_of(plan, cost=10, after=4, drift=0.5), plan)
    assert found["overhead_ms"]["median"] == pytest.approx(10, abs=0.26)  # a drift of 0.5 over half a step
    assert found["after_ms"]["median"] == pytest.approx(4, abs=0.26)
    assert found["overhead"]["median"] == pytest.approx(10 / found["median_step_ms"]["asleep"], rel=0.1)
    assert abs(found["asleep_against_asleep"]["median"]) < 1e-9


def test_a_linear_drift_cancels_where_neighbours_stand_on_both_sides_alike():
    plan = Plan(2, 40, cycle=2)
    found = compare(rows_of(plan, cost=3, drift=1.0), plan)
    assert found["overhead_ms"]["median"] == pytest.approx(3, abs=1e-9)
    assert "after" not in found


def test_no_cost_is_no_cost_and_its_interval_says_how_sure_that_is():
    held = 0
    for seed in range(40):
        plan = Plan(2, 30, cycle=2)
        found = compare(rows_of(plan, cost=0, noise=2.0, seed=seed), plan)["overhead"]
        held += found["low"] <= 0.0 <= found["high"]
    assert held >= 34  # of 40, for an interval of 95%


def test_the_warm_up_does_not_count():
    plan = Plan(2, 10)
    rows = [Step(r.index, r.awake, 1e6 if r.index < plan.first else r.ms) for r in rows_of(plan, cost=10)]
    assert compare(rows[1:], plan)["overhead_ms"]["median"] == pytest.approx(10)


def test_one_hiccup_does_not_move_the_median():
    plan = Plan(2, 10)
    rows = [Step(r.index, r.awake, 5e3 if r.index == 11 else r.ms) for r in rows_of(plan, cost=10)]
    assert compare(rows, plan)["overhead_ms"]["median"] == pytest.approx(10)


def test_memory_is_the_peak_beyond_the_neighbours_and_what_stays():
    plan = Plan(2, 5)
    rows = rows_of(plan, 1, peak_bytes=lambda awake: 1000 + 300 * awake, held_bytes=lambda _: 50)
    rows = [Step(r.index, r.awake, r.ms, r.peak_bytes, 50 if r.index < 2 else 70) for r in rows]
    found = compare(rows, plan)
    assert found["extra_peak_bytes"] == {"median": 300, "largest": 300}
    assert (found["asleep_peak_bytes"], found["held_bytes"]) == (1000, 20)
    assert "extra_peak_bytes" not in compare(rows_of(plan, 1), plan)  # no device: no figure


def test_no_neighbour_is_an_error_and_not_a_figure():
    with pytest.raises(ValueError, match="more time"):
        compare([Step(0, False, 1.0), Step(1, False, 1.0), Step(2, True, 2.0)], Plan(2, 5))


def test_interval_of_one_value_and_its_order():
    assert interval([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0, "count": 1}
    found = interval([float(i) for i in range(101)])
    assert found["low"] < found["median"] == 50.0 < found["high"]


# -- composed -------------------------------------------------------------------------------------------------------


def tier_found(cost, asleep=1000.0, recorded=None, **more):
    same = {"median": cost, "low": cost - 1, "high": cost + 1, "count": 5}
    return {"median_step_ms": {"asleep": asleep}, "overhead_ms": same, "recorded_ms": recorded, **more}


def test_the_share_at_the_default_cadence_by_hand():
    settings = DriftscopeConfig()
    n = settings.deep_every * settings.spectrum_every
    spectra, deep = n // settings.spectrum_every - n // settings.deep_every, n // settings.deep_every
    own = (n - spectra - deep) * 1.0 + spectra * 50.0 + deep * 2000.0
    assert share({"light": 1.0, "spectrum": 50.0, "deep": 2000.0}, 1000.0) == pytest.approx(own / (own + n * 1000.0))


def test_what_the_step_after_an_awake_one_pays_is_part_of_its_cost():
    tiers = {"light": tier_found(1.0), "spectrum": tier_found(50.0, after_ms={"median": 7.0}), "deep": tier_found(9.0)}
    found = composed(tiers)
    assert found["cost_ms"]["median"]["spectrum"] == 57.0
    assert found["share_as_asked"]["low"] < found["share_as_asked"]["median"] < found["share_as_asked"]["high"]
    assert "recorded" not in found["share_as_asked"]
    assert composed({"light": tiers["light"]}) is None


def test_the_budget_is_judged_by_what_it_really_costs():
    cost = {"light": 2.0, "spectrum": 400.0, "deep": 4000.0}
    honest = under_budget(cost, cost, 500.0, 12_000.0)
    assert honest["share"] == pytest.approx(honest["share_recorded"])
    assert honest["share"] <= honest["budget"]
    assert honest["spectrum_every"] > 20
    blind = under_budget(cost, {tier: ms / 4 for tier, ms in cost.items()}, 500.0, 12_000.0)
    assert blind["share"] > honest["budget"] >= blind["share_recorded"]
    assert blind["within_budget_from_step"] is None


# -- where the time goes --------------------------------------------------------------------------------------------


def span(name, start, end):
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


def call(name, start, dur, correlation):
    return {"cat": "cuda_runtime", "name": name, "ts": start, "dur": dur, "args": {"correlation": correlation}}


def kernel(name, dur, correlation, cat="kernel"):
    return {"cat": cat, "name": name, "ts": 1e6, "dur": dur, "args": {"correlation": correlation}}


def test_a_trace_is_booked_on_the_innermost_stage():
    events = [
        span("driftscope/record", 0, 10_000),
        span("driftscope/head", 1000, 5000),
        span("driftscope/head", 6000, 7000),
        span("other", 0, 20_000),
        {"cat": "gpu_user_annotation", "name": "driftscope/head", "ts": 0, "dur": 9e9},
        call("cudaLaunchKernel", 1500, 5, 1),
        call("cudaLaunchKernel", 6500, 5, 2),
        call("cudaLaunchKernelExC", 8000, 5, 3),
        call("cudaMemcpyAsync", 8100, 5, 4),
        call("cudaStreamSynchronize", 8200, 1500, 5),
        call("cuLaunchKernel", 12_000, 5, 6),
        kernel("gemm", 2000, 1), kernel("gemm", 3000, 2), kernel("sum", 100, 3), kernel("copy", 10, 4, "gpu_memcpy"),
        kernel("step", 7000, 6),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1400, "dur": 200},
        {"ph": "M", "name": "process_name", "args": {}},
    ]  # fmt: skip
    found = by_stage(events)
    head, record, rest = found["head"], found["record"], found[REST]
    assert (head.calls, head.launches, head.waits) == (2, 2, 0)
    assert (head.host_ms, head.device_ms) == (pytest.approx(5.0), pytest.approx(5.0))
    assert head.kernels == {"gemm": (5.0, 2)}
    assert (record.calls, record.launches, record.waits) == (1, 2, 1)
    assert (record.host_ms, record.wait_ms) == (pytest.approx(5.0), pytest.approx(1.5))
    assert record.device_ms == pytest.approx(0.11)
    assert (rest.launches, rest.device_ms) == (1, pytest.approx(7.0))


def test_innermost_span_of_nested_equal_and_passed_ones():
    spans = [(0, 10, "a"), (0, 10, "b"), (2, 4, "c"), (5, 6, "d"), (20, 21, "e")]
    assert innermost(spans, [s[:2] for s in spans]) == [None, 0, 1, 1, None]
    assert innermost(spans, [(3, 3), (4.5, 4.5), (20.5, 20.5), (15, 15), (-1, -1)]) == [2, 1, 4, None, None]


def test_the_timer_books_nested_time_once_also_where_a_stage_fails(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 5.0, 5.5, 7.0])  # seconds: outer, inner, inner's end, inner, its failure, outer's end
    monkeypatch.setattr(stages, "now", lambda: next(clock))
    timer = Timer()

    def failing():
        with timer.stage("inner"):
            raise KeyError

    with timer.stage("outer"):
        with timer.stage("inner"):
            pass
        with pytest.raises(KeyError):
            failing()
    assert timer.ms == {"inner": 3500.0, "outer": 3500.0}


# -- the real thing, tiny -------------------------------------------------------------------------------------------


def ran(tmp_path, *arguments):
    """The benchmark in a process of its own; its output file and what it said."""
    out = tmp_path / "out.json"
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, str(BENCHMARKS / "overhead.py"), *TINY, "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text()), done.stderr


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_case_that_fails(tmp_path):
    script = tmp_path / "broken_sweep.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import overhead\n"
        "overhead.SWEEPS['tiny'] = [\n"
        "    {'name': 'broken', 'shape': 'tiny', 'kv_heads': 3, 'tiers': ['light']},\n"
        "    {'name': 'sound', 'shape': 'tiny', 'lora': True},\n"
        "]\n"
        "overhead.main()\n"
    )
    out = tmp_path / "out.json"
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, str(script), *TINY, "--sweep", "tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    cases = result["cases"]
    assert "Error" in cases["broken"]["failed"]
    sound = cases["sound"]
    assert set(sound["tiers"]) == {"light", "spectrum", "deep"}
    assert sound["tiers"]["deep"]["overhead"]["median"] > 0.2  # a deep step does three times the work
    assert sound["tiers"]["deep"]["recorded_ms"] > sound["tiers"]["light"]["recorded_ms"] > 0
    assert not sound["tiers"]["deep"]["off"]
    assert sound["composed"]["share_as_asked"]["recorded"] > 0
    assert {"torch", "trl", "transformers"} <= set(result["versions"])
    assert result["device"]


@pytest.mark.slow
def test_a_profile_names_the_stages_of_a_spectrum_step(tmp_path):
    result, told = ran(tmp_path, "--profile", "--tiers", "spectrum", "--shape", "tiny", "--rounds", "1")
    found = result["profiles"]["spectrum"]
    assert {"head", "reference", "oracle", "attribution", "record"} <= set(found["stages"])
    assert not found["off"]
    assert not found["not_found"]
    row = found["stages"]["head"]
    assert row["calls"] == 1  # of the two micro-batches
    assert row["timed_ms"] > 0
    assert row["host_ms"] > 0
    assert "all stages" in told
