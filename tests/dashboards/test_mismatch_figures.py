from __future__ import annotations

import math
from itertools import pairwise

import pytest

from driftscope.dashboards import figures
from driftscope.dashboards.figures.drift import episodes
from driftscope.dashboards.figures.mismatch_bins import pooled
from driftscope.dashboards.figures.mismatch_distribution import Bar, merge, pool
from driftscope.mismatch.model import Bin, HistogramBin, Mismatch
from driftscope.records import AlertRecord, CanaryRecord, Cause, DriftRecord, IsRatio, StepRecord
from tests.dashboards.simulated import simulated_run


def record(step=1, micro=0, **fields):
    return StepRecord(step=step, micro_step=micro, live="reference", **fields)


def look(step, shares, micro=0, canary=True, **fields):
    """A record with causes (id -> share) and a look of the canary."""
    seen = CanaryRecord(**{"tokens": 9, "noise_floor": 1e-6, "rms": 0.2, "rest_rms": 2e-6, **fields})
    ratio = IsRatio(causes=[Cause(id=i, share=s, factor=0.5) for i, s in shares.items()])
    return record(step, micro, is_ratio=ratio, canary=seen if canary else None)


def trace(panel, name):
    found = [t for t in panel.figure.data if t.name == name]
    assert found, f"no trace {name!r} in {[t.name for t in panel.figure.data]}"
    return found[0]


def bands(panel):
    return {t.name: list(t.y) for t in panel.figure.data if t.stackgroup}


# -- causes -------------------------------------------------------------------------------------------------------


def test_the_band_holds_the_shares_of_each_look():
    panel = figures.mismatch_causes(
        [
            look(1, {"truncated_support": 1.0, "engine_noise": 0.0}),
            look(3, {"stale_weights": 0.75, "engine_noise": 0.25}),
        ]
    )
    assert bands(panel) == {
        "truncated sampling support": [1, 1, 0, 0],
        "stale weights": [0, 0, 0.75, 0.75],
        "engine noise": [0, 0, 0.25, 0.25],
    }
    assert list(panel.figure.data[0].x) == [0, 2, 2, 4]
    assert panel.figure.layout.yaxis.range == (0, 1)
    assert "negative" not in panel.caption


def test_a_single_look_is_a_band_with_a_width():
    panel = figures.mismatch_causes([look(5, {"engine_noise": 1.0})])
    assert list(trace(panel, "engine noise").x) == [4.5, 5.5]


def test_micro_batches_of_a_step_are_averaged():
    panel = figures.mismatch_causes(
        [look(1, {"temperature": 0.5, "engine_noise": 0.5}), look(1, {"engine_noise": 1.0}, 1)]
    )
    assert bands(panel) == {"another temperature": [0.25, 0.25], "engine noise": [0.75, 0.75]}


def test_negative_shares_are_clipped_and_said():
    panel = figures.mismatch_causes(
        [look(1, {"truncated_support": 1.5, "temperature": -0.5, "engine_noise": 0.0}), look(2, {"engine_noise": 1.0})]
    )
    assert bands(panel)["truncated sampling support"][:2] == [1, 1]
    assert bands(panel)["another temperature"][:2] == [0, 0]
    assert "At 1 of 2 steps a part works against the others" in panel.caption
    assert trace(panel, "another temperature").customdata[0][1] == "-50%"


def test_rounding_below_zero_is_not_called_negative():
    panel = figures.mismatch_causes([look(1, {"truncated_support": 1 + 1e-6, "engine_noise": -1e-6})])
    assert "negative" not in panel.caption
    assert sum(v[0] for v in bands(panel).values()) == pytest.approx(1.0)


def test_the_sequence_product_is_words_and_no_band():
    panel = figures.mismatch_causes(
        [look(1, {"truncated_support": 1.0, "engine_noise": 0.0, "sequence_product": 0.0})]
    )
    assert "product over the sequence" not in bands(panel)
    assert "0.500 times it (step 1)" in panel.caption


def test_without_a_look_the_rest_is_not_called_noise():
    panel = figures.mismatch_causes([look(1, {"truncated_support": 0.6}, canary=False)])
    assert bands(panel) == {"truncated sampling support": [0.6, 0.6], "not taken apart": [0.4, 0.4]}
    assert len(panel.figure.data) == 2


def test_the_size_of_the_mismatch_stands_below_beside_the_floor():
    panel = figures.mismatch_causes([look(1, {"engine_noise": 1.0}, bf16_noise=0.03)])
    assert trace(panel, "log ratio, rms").y == (0.2,)
    assert trace(panel, "noise floor").y == (1e-6,)
    assert trace(panel, "bfloat16 noise").yaxis == "y2"
    assert panel.figure.layout.yaxis2.type == "log"


# -- distribution -------------------------------------------------------------------------------------------------


def with_histogram(step, *bins, floor=1e-3):
    rows = [HistogramBin(low=a, high=b, count=n) for a, b, n in bins]
    return record(step, mismatch=Mismatch(tokens=5, histogram=rows), canary=CanaryRecord(noise_floor=floor))


def test_histograms_of_the_last_ten_steps_are_added_up():
    steps = [with_histogram(i, (0.1, 0.15, 2), (-0.15, -0.1, 1)) for i in range(1, 15)]
    panel = figures.mismatch_distribution(steps)
    bars = trace(panel, "tokens")
    assert [row[0] for row in bars.customdata] == [10, 20]
    assert sum(y * w for y, w in zip(bars.y, bars.width, strict=True)) == pytest.approx(1.0)
    assert bars.x[0] == pytest.approx(-bars.x[1])
    assert bars.x[1] == pytest.approx((math.asinh(100) + math.asinh(150)) / 2)
    assert "30 tokens of steps 5 to 14" in panel.caption
    assert "100% of the tokens are more than 3 times" in panel.caption


def test_the_noise_floor_is_a_density_on_the_same_axis():
    panel = figures.mismatch_distribution([with_histogram(1, (-1e-3, 1e-3, 3))])
    curve = next(t for t in panel.figure.data if t.name.startswith("noise floor"))
    area = sum((b - a) * (p + q) / 2 for a, b, p, q in zip(curve.x, curve.x[1:], curve.y, curve.y[1:], strict=False))
    assert area == pytest.approx(1.0, abs=1e-3)
    assert max(curve.y) == curve.y[60] == pytest.approx(1 / math.sqrt(2 * math.pi))
    assert "0% of the tokens" in panel.caption


def test_fine_bins_are_put_together_and_gaps_stay():
    bars = merge([Bar(0.0, 0.1, 1), Bar(0.1, 0.2, 2), Bar(0.2, 0.4, 3), Bar(50.0, 80.0, 4)], 1.0)
    assert [(b.low, b.high, b.count) for b in bars] == [(0.0, 0.4, 6), (50.0, 80.0, 4)]
    thin = merge([Bar(10.0, 10.01, 1)], 1.0)[0]
    assert math.asinh(thin.high) - math.asinh(thin.low) == pytest.approx(0.3)


def test_open_bins_end_and_broken_ones_are_left_out():
    bins = [HistogramBin(low=None, high=-2.0, count=1), HistogramBin(low=2.0, high=None, count=1),
            HistogramBin(low=None, high=None, count=9), HistogramBin(low=1.0, high=1.0, count=9)]  # fmt: skip
    assert pool(bins) == [Bar(-4.0, -2.0, 1), Bar(2.0, 4.0, 1)]


@pytest.mark.parametrize(("floor", "words"), [(None, "Unavailable: the noise floor"), (0.0, "is exactly 0")])
def test_a_missing_noise_floor_is_said(floor, words):
    made = with_histogram(1, (0.1, 0.15, 2), floor=floor)
    if floor is None:
        made.canary = None
    panel = figures.mismatch_distribution([made])
    assert words in panel.caption
    assert len(panel.figure.data) == 1


def test_a_floor_that_was_not_measured_in_a_look_is_not_called_zero():
    panel = figures.mismatch_distribution([with_histogram(1, (0.1, 0.15, 2), floor=None)])
    assert "Unavailable: the noise floor" in panel.caption


# -- by probability and position ----------------------------------------------------------------------------------


def test_bins_are_pooled_by_their_counts():
    rows = pooled([[Bin(low=0, high=1, count=1, mean=1.0, abs_mean=1.0, std=0.0)],
                   [Bin(low=0, high=1, count=3, mean=-1.0, abs_mean=1.0, std=0.0), Bin(low=1, high=2)]])  # fmt: skip
    (bin_,) = rows.values()
    assert (bin_.count, bin_.mean, bin_.size / bin_.count) == (4, -0.5, 1.0)
    assert bin_.error == pytest.approx(2 * math.sqrt(0.75 / 4))


def test_empty_bins_inside_are_holes_and_outside_are_left_out():
    octaves = [Bin(low=2.0**i, high=2.0 ** (i + 1)) for i in range(6)]
    for i in (1, 3):
        octaves[i] = Bin(low=2.0**i, high=2.0 ** (i + 1), count=4, mean=0.1 * i, abs_mean=0.2, std=0.0)
    panel = figures.by_position([record(mismatch=Mismatch(by_octave=octaves))])
    mean = trace(panel, "mean d, ± 2 s.e.")
    assert list(mean.x) == ["2–3", "4–7", "8–15"]
    assert list(mean.y) == [pytest.approx(0.1), None, pytest.approx(0.3)]
    assert list(trace(panel, "tokens").y) == [4, 0, 4]


def test_bins_have_readable_names():
    names = [
        "under 10⁻⁶",
        "10⁻⁶–10⁻⁵",
        "10⁻⁵–10⁻⁴",
        "10⁻⁴–0.001",
        "0.001–0.01",
        "0.01–0.1",
        "0.1–0.5",
        "0.5–0.9",
        "0.9–1",
    ]
    edges = [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0]
    bins = [Bin(low=a, high=b, count=1, mean=0, abs_mean=0, std=0) for a, b in pairwise(edges)]
    tenths = [Bin(low=i / 10, high=(i + 1) / 10, count=1, mean=0, abs_mean=0, std=0) for i in range(10)]
    octaves = [Bin(low=low, high=high, count=1, mean=0, abs_mean=0) for low, high in ((1, 2), (2, None))]
    made = Mismatch(by_probability=bins, by_decile=tenths, by_octave=octaves)
    assert list(figures.by_probability([record(mismatch=made)]).figure.data[0].x) == names
    assert list(figures.by_progress([record(mismatch=made)]).figure.data[0].x)[::9] == ["0–10%", "90–100%"]
    assert list(figures.by_position([record(mismatch=made)]).figure.data[0].x) == ["1", "from 2"]


# -- canary -------------------------------------------------------------------------------------------------------


def test_distances_are_lines_and_the_first_disagreement_is_marked():
    steps = [
        look(1, {"engine_noise": 1.0}, distances={"current": 1e-6}),
        look(2, {"stale_weights": 1.0}, distances={"current": 0.1, "previous": 2e-6}, agrees_with="previous"),
        look(3, {"stale_weights": 1.0}, distances={"current": 0.2, "previous": 2e-6}, agrees_with="previous"),
    ]
    panel = figures.canary(steps)
    assert trace(panel, "current weights").y == (1e-6, 0.1, 0.2)
    assert list(trace(panel, "older weights").y) == [None, 2e-6, 2e-6]
    assert [s.x0 for s in panel.figure.layout.shapes] == [2]
    assert "step 2" in panel.figure.layout.annotations[0].text
    assert not figures.canary(steps[:1]).figure.layout.shapes


# -- drift --------------------------------------------------------------------------------------------------------


def watched(step, value, state="quiet", series="log_gap", **fields):
    return record(step, drift={series: DriftRecord(value=value, state=state, floor=0.1, **fields)})


def an_episode():
    return [
        watched(1, 0.0, "warm-up"),
        watched(2, 0.0, baseline=0.0),
        watched(3, 0.1, baseline=0.0),
        watched(4, 1.0, "alarm", baseline=0.0, kind="shift", started=3),
        watched(5, 1.0, "alarm", baseline=1.0, kind="trend"),
        watched(6, 0.0, baseline=1.0),
        watched(7, 5.0, "alarm", baseline=0.0, kind="spike"),
    ]


def test_episodes_run_from_the_estimated_beginning_to_the_last_step_in_alarm():
    found = episodes(an_episode(), "log_gap")
    assert [(e.started, e.found, e.last, e.kind) for e in found] == [(3, 4, 5, "trend"), (7, 7, 7, "spike")]


def test_alarms_zones_level_and_floor_are_drawn():
    panel = figures.drift(an_episode())
    marks = trace(panel, "alarm found")
    assert (marks.x, marks.y) == ((4, 7), (1.0, 5.0))
    assert marks.customdata[0] == "trend, began about step 3"
    rects = [(s.x0, s.x1) for s in panel.figure.layout.shapes]
    assert rects == [(0.5, 1.5), (2.5, 5.5), (6.5, 7.5)]
    assert list(trace(panel, "normal level").y) == [None, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    band = next(t for t in panel.figure.data if t.fill == "toself")
    assert (min(band.y), max(band.y)) == (-0.1, 1.1)
    assert "2 episodes" in panel.caption


def test_a_light_step_that_was_never_meant_to_have_the_value_is_no_hole():
    steps = [watched(i, 1.0 * i if i % 2 else None, baseline=0.5) for i in range(1, 8)]
    steps = [s if i % 2 == 0 else s.model_copy(update={"tier": "light"}) for i, s in enumerate(steps)]
    line = trace(figures.drift(steps), "log of the gap in gradient norm")
    assert (list(line.x), list(line.y)) == ([1, 3, 5, 7], [1, 3, 5, 7])
    assert list(trace(figures.drift(steps), "normal level").x) == [1, 3, 5, 7]


def test_a_second_warm_up_is_a_stretch_of_its_own():
    states = ("warm-up", "warm-up", "quiet", "warm-up", "quiet")
    panel = figures.drift([watched(i, 0.0, state) for i, state in enumerate(states, 1)])
    assert [(s.x0, s.x1) for s in panel.figure.layout.shapes] == [(0.5, 2.5), (3.5, 4.5)]


def test_alerts_are_marked_on_the_series_that_they_name():
    steps = [record(i, drift={"a": DriftRecord(value=1.0), "b": DriftRecord(value=2.0)}) for i in range(1, 5)]
    alert = {"rule": "DS211", "severity": "warning", "title": "t", "remedy": "r"}
    named = AlertRecord(step=2, evidence="b rose", **alert)
    other = AlertRecord(step=3, **{**alert, "rule": "DS101"}, evidence="b")
    panel = figures.drift(steps, [named, other])
    (mark,) = [t for t in panel.figure.data if t.name == "alert"]
    assert (mark.x, mark.y, mark.yaxis) == ((2,), (2.0,), "y2")
    unnamed = figures.drift(steps, [AlertRecord(step=2, evidence="moved", **alert)])
    assert len([t for t in unnamed.figure.data if t.name == "alert"]) == 2


def test_series_in_alarm_are_shown_first_where_not_all_fit():
    quiet = {f"s{i}": DriftRecord(value=1.0, state="quiet") for i in range(12)}
    steps = [record(i, drift=quiet | {"s11": DriftRecord(value=1.0, state="alarm")}) for i in (1, 2)]
    panel = figures.drift(steps)
    titles = [a.text for a in panel.figure.layout.annotations]
    assert titles == [*(f"s{i}" for i in range(7)), "s11"]
    assert "4 further series not shown" in panel.caption


def test_the_names_of_series_are_text():
    panel = figures.drift([watched(1, 0.0, series="<a href='x'>y</a>")])
    assert panel.figure.layout.annotations[0].text == "&lt;a href='x'&gt;y&lt;/a&gt;"


def test_the_simulated_run_tells_its_story():
    run = simulated_run()
    assert bands(figures.mismatch_causes(run.steps))["stale weights"][-1] > 0.4
    marks = trace(figures.drift(run.steps, run.alerts), "alarm found")
    assert marks.x == (25,)
    assert figures.canary(run.steps).figure.layout.shapes[0].x0 == 21
