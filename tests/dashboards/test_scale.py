"""The report of a long run is thinned, with every extreme and alarm; that of a short one is the same either way."""

from __future__ import annotations

import re
import statistics

import pytest

from driftscope.dashboards import figures, view
from driftscope.dashboards.process_view import processes_section
from driftscope.dashboards.report import render, render_html
from driftscope.dashboards.series import POINT_LIMIT, Thinned, by_step, extremes, getter, middle, total
from driftscope.errors import RecordError
from driftscope.journal import read_run
from driftscope.reading import summarise, summary
from driftscope.records import StepRecord
from driftscope.verdict import judge
from tests.conftest import find_chromium
from tests.dashboards.simulated import simulated_run, step_record, verdict
from tests.long_runs import long_run, random_records, with_processes, write

SPIKES = {3001: 4321.5, 5001: 0.000125, 7007: 9876.25}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A summed up run of 10,000 steps."""
    return summarise(long_run(tmp_path_factory.mktemp("long"), 10_000, SPIKES))


@pytest.fixture(scope="module")
def page(long):
    return render_html(long, judge(long))


@pytest.mark.parametrize("seed", range(12))
def test_a_short_run_has_the_same_page_however_it_was_read(tmp_path, seed):
    directory = write(tmp_path, random_records(seed), seed)
    try:
        whole = read_run(directory)
    except RecordError:
        return
    summed = summarise(directory)
    if len(summed.kept()) < summed.records:  # records without any figure have no place in it
        assert view.thinned_words(Thinned(summed)) is not None
        return
    assert render_html(summed, judge(summed)) == render_html(whole, judge(whole))


def test_the_page_says_that_it_thinned_and_how(page, long):
    words = view.thinned_words(Thinned(long))
    assert words in page
    assert "11,500 records" in words
    assert "the lowest and the highest value of each of 40 stretches" in words
    assert "every alert is counted below" in words
    assert "10,000 steps and 11,500 micro-batches on record" in page


def test_every_extreme_is_drawn(page):
    for value in SPIKES.values():
        assert f"{value:.7g}" in page


def test_the_page_stays_small(page, tmp_path):
    small = render_html(simulated_run(3), verdict())
    assert len(page) - len(small) < 3_000_000
    points = [text.count(",") + 1 for text in re.findall(r'"x":\[([^\]]*)\]', page)]
    assert max(points) <= 2 * POINT_LIMIT + 60


def test_numbers_are_those_of_all_records(tmp_path):
    directory = long_run(tmp_path, 2000, {})
    whole, steps = read_run(directory).steps, Thinned(summarise(directory))
    assert len(steps) < len(whole)
    for name in ("gap.grad_norm_ratio", "live_grad_norm", "is_ratio.applied.mean", "paths.liger.loss", "step_ms",
                 "canary.rms", "is_ratio.raw.quantiles.p05"):  # fmt: skip
        get = getter(name)
        assert middle(steps, get) == middle(whole, get), name
        assert extremes(steps, get) == extremes(whole, get), name
        assert total(steps, get) == pytest.approx(total(whole, get)), name
    assert by_step(steps, getter("live_grad_norm"), log=True).dropped == 0
    tiles = [(t.label, t.value, t.hint) for t in view.tiles(steps)]
    assert tiles == [(t.label, t.value, t.hint) for t in view.tiles(whole)]
    for table in ("path_table", "cost_table", "ratio_table", "ledger_table"):
        assert getattr(view.tables, table)(steps) == getattr(view.tables, table)(whole), table
    assert figures.summarize_causes(steps) == figures.summarize_causes(whole)
    assert figures.by_position(steps).caption == figures.by_position(whole).caption


def test_every_alert_is_counted_in_its_stretch(long):
    panel = view.alarms_panel(Thinned(long))
    drawn = [int(row[0].replace(",", "")) for t in panel.figure.data for row in t.customdata]
    assert sum(drawn) == 500
    assert "All 500 alerts" in panel.caption
    group = next(g for g in view.rule_groups(view.shown(long), judge(long)) if g.rule == "DS101")
    assert group.when == "500 alerts, steps 1 to 9981"
    assert (len(group.examples), group.omitted) == (6, 494)
    assert [when for _, when, _ in group.examples] == [f"step {n}" for n in (1, 21, 41, 9941, 9961, 9981)]


def test_a_short_run_shows_no_strip_of_alerts(tmp_path):
    run = simulated_run(2)
    assert view.alarms_panel(run.steps) is None
    assert view.thinned_words(run.steps) is None


def test_render_reads_a_large_journal_as_a_stream(tmp_path, monkeypatch):
    directory = write(tmp_path, simulated_run(4).steps)
    first = render(directory).read_bytes()
    monkeypatch.setattr(summary, "STREAM_BYTES", 10)
    assert render(directory).read_bytes() == first


def test_ranks_gradients_and_cadence_have_their_place():
    run = simulated_run(4)
    run.steps[:] = [with_processes(s) for s in run.steps]
    html = render_html(run, verdict())
    places = [html.index(f'<section id="{name}"') for name in ("ledger", "ranks", "gradients", "cost", "findings")]
    assert places == sorted(places)
    parts = processes_section(run.steps)
    assert parts.ranks.sentences[0] == "4 processes."
    assert "rank 3 is the slowest most often, on 16 of 16 records." in parts.ranks.sentences[1]
    assert "rank 1" in parts.ranks.sentences[2]
    table, apart = parts.ranks.tables
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3"]
    assert table.rows[2][2:4] == ["432", "433"]
    assert table.caption == "The ranks at step 4, micro-batch 4"
    assert apart.rows == [["normalizer_measured", "2", "8", "1", "3"]]
    values = dict(parts.gradient.tables[0].rows)
    assert values["Norm, Liger (fused)"] == "2.100 ± 0.020"
    assert values["Cosine"] == "0.9800 ± 0.010"
    assert "3 deep steps" in parts.gradient.sentences[0]
    assert "4,096 buckets" in parts.gradient.sentences[0]
    ratio, modules = parts.gradient.panels
    assert all(e > 0 for e in ratio.figure.data[0].error_y.array)
    assert modules.figure.data[0].y[0] == "layers.1.mlp"
    tile = next(t for t in view.tiles(run.steps) if t.label == "Spent of the budget")
    assert tile.value.endswith("of 2%")
    assert "every 20 steps" in tile.hint


def test_without_them_there_is_no_such_section():
    html = render_html(simulated_run(2), verdict())
    for name in ("ranks", "gradients", "cost"):
        assert f'id="{name}"' not in html
    assert "Spent of the budget" not in html


def test_one_process_is_no_section_of_ranks():
    assert processes_section([with_processes(step_record(1), processes=1)]).ranks is None


def test_what_ranks_lack_is_a_dash():
    record = StepRecord(step=1, micro_step=0, live="liger", ranks={"processes": 2, "rows": [{"rank": 0}]})
    (table,) = processes_section([record]).ranks.tables
    assert table.rows == [["0", *["–"] * 10, "0"]]
    assert "1 of 2" in table.caption


def test_an_exact_gradient_has_no_error_and_no_missing_one():
    record = StepRecord(step=1, micro_step=0, live="liger", gradient={"method": "exact", "norm_ratio": {"value": 2.0,
                        "error": 0.0}})  # fmt: skip
    part = processes_section([record]).gradient
    assert part.sentences == ["From exact."] or "exact" in part.sentences[0]
    values = dict(part.tables[0].rows)
    assert values["Cosine"] == "–"
    assert next(v for k, v in values.items() if k.startswith("Norm ratio")) == "2"


def test_a_median_of_many_is_stated_within_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr("driftscope.reading.digest.EXACT", 50)
    directory = long_run(tmp_path, 400, {})
    whole, steps = read_run(directory).steps, Thinned(summarise(directory))
    values = [s.live_grad_norm for s in whole if s.live_grad_norm is not None]
    assert len(values) > 50
    assert middle(steps, getter("live_grad_norm")) == pytest.approx(statistics.median(values), rel=1.1e-3)


@pytest.mark.browser
def test_the_page_of_a_long_run_with_ranks_is_drawn(tmp_path):
    from playwright.sync_api import sync_playwright

    directory = long_run(tmp_path / "run", 2000, {1001: 777.0})
    with (directory / "records.jsonl").open("a") as stream:
        for number in range(2001, 2061):
            stream.write(with_processes(step_record(number)).model_dump_json(by_alias=True) + "\n")
    run = summarise(directory)
    html = render_html(run, judge(run))
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 900})
        told = []
        page.on("console", lambda m: told.append(m.text))
        page.on("pageerror", lambda e: told.append(str(e)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        ids = ("alarms", "ranks-time", "gradient-ratio", "gradient-modules", "cadence")
        marks = "id => document.querySelectorAll(`#plot-${id} .point, #plot-${id} .js-line`).length"
        assert {name: page.evaluate(marks, name) > 0 for name in ids} == dict.fromkeys(ids, True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert told == []
        browser.close()
