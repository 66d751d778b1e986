from __future__ import annotations

import json
import math
from statistics import median

import pytest

from driftscope.dashboards import figures
from driftscope.dashboards.figures.base import label, log_ticks
from driftscope.records import Cause, CoefPoint, Gap, IsRatio, PathRecord, RatioStats, StepRecord
from tests.dashboards.simulated import simulated_run, step_record

MAKERS = [
    figures.grad_norm,
    figures.loss,
    figures.gap,
    figures.scatter,
    figures.causes,
    figures.ratio_time,
    figures.ratio_distribution,
    figures.normalizer,
    figures.residual,
    figures.mismatch_causes,
    figures.mismatch_distribution,
    figures.by_probability,
    figures.by_position,
    figures.by_progress,
    figures.canary,
    figures.drift,
]
UP = "pushed up (c &lt; 0)"
by_name = pytest.mark.parametrize("maker", MAKERS, ids=lambda m: m.__name__)


@pytest.fixture(scope="module")
def steps():
    return simulated_run(12).steps


def trace(panel, name):
    found = [t for t in panel.figure.data if t.name == name]
    assert found, f"no trace {name!r} in {[t.name for t in panel.figure.data]}"
    return found[0]


def bare(step=1, **fields):
    return StepRecord(step=step, micro_step=0, live="liger", **fields)


@by_name
def test_every_figure_is_drawn_and_pure(maker, steps):
    before = [s.model_dump_json() for s in steps]
    first, second = maker(steps), maker(steps)
    assert first.unavailable is None
    assert first.figure.data
    assert first.caption
    assert any(c.isdigit() for c in first.alt)
    assert json.dumps(first.figure.to_plotly_json(), sort_keys=True) == json.dumps(
        second.figure.to_plotly_json(), sort_keys=True
    )
    assert [s.model_dump_json() for s in steps] == before


@by_name
def test_missing_data_are_a_sentence_not_an_empty_plot(maker):
    for records in (
        [],
        [bare()],
        [bare(paths={"liger": PathRecord()}, gap=Gap(candidate="liger", reference="reference"))],
    ):
        panel = maker(records)
        assert panel.figure is None
        assert panel.unavailable.startswith("Unavailable: ")
        assert len(panel.unavailable) > 30


def test_the_recorded_reason_is_told():
    panel = figures.residual([bare(unavailable={"residual": "the hidden gradient never came"})])
    assert "the hidden gradient never came" in panel.unavailable


def test_grad_norm_holds_the_medians_of_every_path_and_the_trainers_own(steps):
    panel = figures.grad_norm(steps)
    first = [s.paths["liger"].hidden_grad_norm for s in steps if s.step == 1]
    assert trace(panel, "Liger (fused) · trains").y[0] == pytest.approx(median(first))
    assert trace(panel, "reported by the trainer").y[0] == steps[3].live_grad_norm
    diamonds = trace(panel, "TRL reference, all parameters")
    assert diamonds.mode == "markers"
    assert [y for y in diamonds.y if y is not None] == [
        s.paths["reference"].param_grad_norm for s in steps if s.tier == "deep"
    ]
    assert panel.figure.layout.yaxis.type == panel.figure.layout.yaxis2.type == "log"
    assert len(panel.figure.data) == len({id(t) for t in panel.figure.data})


def test_gap_draws_its_thresholds_in_both_directions():
    steps = [
        bare(i, gap=Gap(candidate="liger", reference="reference", grad_norm_ratio=r))
        for i, r in enumerate((20.0, 0.05))
    ]
    panel = figures.gap(steps, warning=1.5, critical=10.0)
    levels = {round(s.y0, 6) for s in panel.figure.layout.shapes if s.type == "line"}
    assert levels == {1, 1.5, 10.0, round(1 / 1.5, 6), 0.1}
    low, high = panel.figure.layout.yaxis.range
    assert 10**low < 0.05
    assert 10**high > 20


def test_gap_axis_shows_one_and_the_warning_for_an_honest_run():
    steps = [
        bare(i, gap=Gap(candidate="liger", reference="reference", grad_norm_ratio=1.0, noise_floor=1e-6))
        for i in (1, 2)
    ]
    panel = figures.gap(steps)
    low, high = (10**v for v in panel.figure.layout.yaxis.range)
    assert low < 1 / 1.5 < 1.5 < high < 10
    assert "1×10⁻⁶" in panel.caption


def test_scatter_shows_magnitudes_and_counts_what_a_log_axis_cannot():
    points = [
        CoefPoint(candidate=-2.0, reference=-0.02, ratio=0.01),
        CoefPoint(candidate=1.0, reference=0.02, ratio=0.02),
        CoefPoint(candidate=1.0, reference=-0.01, ratio=None),
        CoefPoint(candidate=1.0, reference=0.0),
        CoefPoint(candidate=0.0, reference=0.0),
        CoefPoint(candidate=None, reference=0.5),
    ]
    panel = figures.scatter([bare(1), bare(7, scatter=points), bare(8)])
    assert trace(panel, UP).y == (2.0,)
    assert trace(panel, UP).x == (0.02,)
    assert trace(panel, "opposite signs, no ratio").x == (0.01,)
    line = trace(panel, "equal")
    assert line.x == line.y
    assert trace(panel, UP).marker.color == (math.log10(0.01),)
    assert "Step 7" in panel.caption
    for words in ("1 token not shown: zero on the reference only", "zero on both paths", "no finite coefficient"):
        assert words in panel.caption
    assert "100×" in panel.caption


def test_waterfall_goes_from_one_to_the_gap():
    causes = [Cause(id="is_correction", share=0.9, factor=50.0), Cause(id="normalizer", share=0.1, factor=0.5)]
    steps = [bare(i, gap=Gap(candidate="a", reference="b", grad_norm_ratio=25.0), causes=causes) for i in (1, 2, 3)]
    panel = figures.causes(steps)
    bars = [(t.y[0].replace("<br>", " "), t.base[0], t.base[0] + t.x[0]) for t in panel.figure.data]
    assert [b[0] for b in bars] == ["importance sampling correction", "normaliser", "candidate / reference"]
    assert bars[0][1:] == pytest.approx((1.0, 50.0))
    assert bars[1][1:] == pytest.approx((25.0, 50.0))
    assert bars[2][1:] == pytest.approx((1.0, 25.0))
    assert panel.figure.layout.xaxis.type == "log"


def test_waterfall_never_folds_a_rest_into_a_cause():
    record = bare(
        1,
        gap=Gap(candidate="a", reference="b", grad_norm_ratio=30.0),
        causes=[Cause(id="tool_mask", share=0.5, factor=5.0)],
        unexplained={"share": 0.5, "factor": 3.0},
    )
    names = [t.y[0].replace("<br>", " ") for t in figures.causes([record]).figure.data]
    assert names == ["tool mask", "unexplained", "difference of medians", "candidate / reference"]
    bars = {t.y[0].replace("<br>", " "): t.text[0] for t in figures.causes([record]).figure.data}
    assert bars["unexplained"] == "3×"
    assert bars["difference of medians"] == "2×"


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.0001, "No cause is on record"), (30.0, "Unavailable: no record attr")]
)
def test_no_cause_is_good_news_only_where_the_paths_agree(ratio, words):
    panel = figures.causes([bare(1, gap=Gap(candidate="a", reference="b", grad_norm_ratio=ratio))])
    assert panel.figure is None
    assert panel.unavailable.startswith(words)


def test_causes_are_ranked_by_effect_in_either_direction():
    causes = [Cause(id=i, share=0.1, factor=f) for i, f in (("a", 1.1), ("b", 0.01), ("c", 20.0), ("d", None))]
    assert [c.id for c in figures.summarize_causes([bare(1, causes=causes)])] == ["b", "c", "a", "d"]


def test_ratio_of_zero_survives_the_log_axis():
    applied = RatioStats(level="sequence", count=4, mean=0.0, min=0.0, max=0.0, quantiles={"p05": 0.0, "p95": 0.0})
    raw = RatioStats(level="sequence", count=4, mean=5.0, min=0.0, max=9.0, quantiles={"p05": 0.0, "p95": 8.0})
    steps = [bare(i, is_ratio=IsRatio(raw=raw, applied=applied, cap=3.0)) for i in (1, 2, 3)]
    panel = figures.ratio_time(steps)
    assert trace(panel, "raw").y == (5.0, 5.0, 5.0)
    assert "applied by the loss" not in [t.name for t in panel.figure.data]
    flat = [v for t in panel.figure.data for v in t.y if v is not None]
    assert min(flat) > 0


def test_distribution_is_labelled_as_rebuilt_and_uses_the_quantiles(steps):
    panel = figures.ratio_distribution(steps)
    assert "Rebuilt from the quantiles" in panel.caption
    box = next(t for t in panel.figure.data if t.type == "box" and t.name == "raw")
    expected = [median(s.is_ratio.raw.quantiles[q] for s in steps) for q in ("p05", "p25", "p50", "p75", "p95")]
    assert [box.lowerfence[0], box.q1[0], box.median[0], box.q3[0], box.upperfence[0]] == pytest.approx(expected)


def test_normalizer_shows_each_micro_batch_of_one_rank(steps):
    extra = [s.model_copy(update={"rank": 1}) for s in steps]
    panel = figures.normalizer(steps + extra)
    claimed = trace(panel, "Liger (fused) · trains")
    assert len(claimed.x) == len(steps)
    assert claimed.y[0] == steps[0].paths["liger"].normalizer
    assert list(claimed.x[:4]) == [0.625, 0.875, 1.125, 1.375]
    assert trace(panel, "Liger (fused) · trains, measured").y[0] == steps[0].paths["liger"].normalizer_measured
    assert "Rank 0 of 2" in panel.caption


def test_an_exactly_zero_residual_is_said_and_not_drawn():
    assert "exactly zero" in figures.residual([bare(1, residual=0.0)]).unavailable


@by_name
def test_one_step_and_long_runs_stay_light(maker, steps):
    assert maker([step_record(1, 0, deep=True)]).figure is not None
    sparse = [s.model_copy(update={"step": i + 1}) for i, s in enumerate(steps * 60)]
    size = len(json.dumps(maker(sparse).figure.to_plotly_json()))
    assert size < 400_000, f"{size} bytes for {len(sparse)} steps"


def test_labels_are_never_plotly_markup():
    assert label("<a href='x'>y</a>") == "&lt;a href='x'&gt;y&lt;/a&gt;"
    assert len(label("x" * 500)) == 60


@pytest.mark.parametrize(("low", "high"), [(-9, 5), (-2.3, 0.2), (0.1, 0.4), (1.0, 1.0001), (-0.6, 0.3), (-300, 300)])
def test_log_axes_always_have_a_few_ticks_in_range(low, high):
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert all(10 ** (low - 1e-6) * 0.99 <= t <= 10 ** (high + 1e-6) * 1.01 for t in ticks)
    assert ticks == sorted(ticks)


def test_an_axis_over_a_few_percent_has_round_ticks():
    assert log_ticks(math.log10(0.91), math.log10(1.12)) == [0.95, 1.0, 1.05, 1.1]


def test_a_cause_that_is_seldom_there_is_not_shown_as_typical():
    often = Cause(id="is_correction", share=1.0, factor=50.0)
    seldom = Cause(id="tool_mask", share=0.9, factor=9.0)
    steps = [bare(i, causes=[often, *([seldom] if i == 3 else [])]) for i in range(1, 6)] + [bare(6)]
    rows = {c.id: c for c in figures.summarize_causes(steps)}
    assert (rows["tool_mask"].factor, rows["tool_mask"].high, rows["tool_mask"].seen) == (1.0, 9.0, 1)
    assert rows["is_correction"].factor == 50.0
