"""The comparison's page: same bytes for the same runs, hostile text stays text, drawn and within its width."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from driftscope.comparison import compare, load
from driftscope.comparison.model import Skipped
from driftscope.dashboards.compare import SHAPES, render_html
from driftscope.dashboards.compare_figures import SYMBOLS, panels, style
from driftscope.dashboards.compare_text import show
from driftscope.dashboards.compare_view import figures_grid, overview
from driftscope.dashboards.report import _ESCAPES
from driftscope.journal import JournalWriter
from tests.dashboards.simulated import simulated_run
from tests.dashboards.test_report import HOSTILE, Outline, poisoned_run
from tests.dashboards.test_report_browser import browser, visit  # noqa: F401 - fixtures


def saved(run, directory):
    with JournalWriter(directory) as journal:
        if run.info is not None:
            journal.write_info(run.info)
        for record in (*run.steps, *run.alerts, *run.notes):
            journal.write(record)
    return load(directory)


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """A broken run and one whose ratio is honest; nothing of the directory's random name is in the labels."""
    root = tmp_path_factory.mktemp("runs")
    honest = simulated_run(12, ratio=1.0)
    honest = replace(honest, info=honest.info.model_copy(update={"run_id": "h", "trainer": {"top_p": 1.0}}), alerts=[])
    return [saved(simulated_run(12), root / "broken"), saved(honest, root / "honest")]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, columns):
    """Hostile text in every field of a run that text can stand in."""
    bad = saved(poisoned_run(9), tmp_path_factory.mktemp("bad") / "run")
    whole = "|".join(HOSTILE)
    bad = replace(bad, headline=whole, problems=(whole,), path=columns[0].path.parent / whole.replace("/", ":"))
    return compare([columns[0], bad], skipped=[Skipped(whole, whole)])


@pytest.fixture(scope="module")
def many(columns):
    return compare(
        [replace(columns[i % 2], path=columns[0].path.parent / f"sweep-{i:02d}", run_id=f"r{i}") for i in range(50)]
    )


def test_same_runs_give_the_same_bytes(columns):
    page = render_html(compare(columns))
    assert page == render_html(compare([load(c.path) for c in columns]))
    code = (
        "import sys, hashlib; from pathlib import Path; from driftscope.comparison import compare, load;"
        "from driftscope.dashboards.compare import render_html;"
        "html = render_html(compare([load(Path(p)) for p in sys.argv[1:]]));"
        "print(hashlib.sha256(html.encode()).hexdigest(), 'torch' in sys.modules)"
    )
    import hashlib

    done = subprocess.run(
        [sys.executable, "-c", code, *(str(c.path) for c in columns)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [hashlib.sha256(page.encode()).hexdigest(), "False"]


def test_the_page_holds_headline_settings_figures_and_findings(columns):
    page = render_html(compare(columns))
    text = " ".join("".join(Outline(page).text).split())
    comparison = compare(columns)
    assert comparison.headline in text
    for words in ("top_p (trainer)", "Gap in gradient norm, median", "▲ better", "DS102", "less severe", "honest"):
        assert words in text
    assert len(re.findall(r"plotly\.js v\d", page)) == 1
    links = [v for _, attrs in Outline(page).tags for k, v in attrs.items() if k in ("src", "href")]
    assert links and all(v.startswith(("#", "data:,")) for v in links)


def test_hostile_text_stays_text(poisoned, columns):
    page = render_html(poisoned)
    outline, plain = Outline(page), Outline(render_html(compare(columns)))
    tags = [t for t, _ in outline.tags]
    assert set(tags) <= {t for t, _ in plain.tags} | {"ul", "li", "strong"}
    assert "img" not in tags
    assert tags.count("script") == 3 + 3
    assert not any(k.startswith("on") for _, attrs in outline.tags for k in attrs)
    text = "".join(outline.text)
    for words in HOSTILE[:4]:
        assert text.count(words) > 5
    assert not re.search("[\x00\x1b\u2028\u202e]", page)
    for block in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL):
        assert not set(block) & {chr(c) for c in _ESCAPES}
        assert set(json.loads(block)) >= {"data", "layout"}


def test_the_terminal_is_not_steered_and_keeps_its_width(poisoned, columns):
    for comparison in (poisoned, compare(columns), compare([columns[0]] * 8)):
        stream = io.StringIO()
        show(comparison, Console(file=stream, width=300, highlight=False))
        out = stream.getvalue()
        assert not re.search("[\x00\x1b\r\u2028\u202e]", out)
    assert max(map(len, out.splitlines())) <= 110
    assert out.count("broken (baseline)") >= 4  # in every part of a table that is too wide


def test_a_narrow_terminal_is_used_as_it_is(columns):
    stream = io.StringIO()
    show(compare(columns), Console(file=stream, width=61, highlight=False, force_terminal=True, color_system=None))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert max(map(len, plain.splitlines())) <= 61


def test_eighty_runs_are_drawn_in_styles_of_their_own():
    looks = [style(i, baseline=-1) for i in range(80)]
    assert len(set(looks)) == 80
    assert len({(x.color, x.dash) for x in looks[:24]}) == 24
    assert set(SYMBOLS) == set(SHAPES)
    assert style(3, baseline=3).width > 2 * style(3, baseline=0).width


def test_many_runs_stand_one_to_a_row_and_stay_light(many, columns):
    page = render_html(many)
    assert len(page) < 5_600_000
    assert page.count('data-run="') == 50
    assert figures_grid(many).turned().headings == overview(many).headings
    for panel in panels(many):
        assert len(panel.figure.data) == 50
        assert sum(len(t.x) for t in panel.figure.data) <= 15_000


def test_runs_without_values_are_named_in_the_figure(columns):
    bare = replace(columns[1], lines={}, path=columns[1].path.parent / "bare")
    drawn = {p.id: p for p in panels(compare([columns[0], bare]))}
    assert "Without a value: bare." in drawn["gap"].caption
    empty = [replace(c, lines={}) for c in columns]
    assert all(p.figure is None and p.unavailable for p in panels(compare(empty)))
    assert "Unavailable: no run has a value above zero." in render_html(compare(empty))


def test_a_value_of_zero_is_counted_where_the_axis_cannot_show_it(columns):
    zero = replace(columns[1], dropped={"is_ratio": 7})
    (panel,) = [p for p in panels(compare([columns[0], zero])) if p.id == "is-ratio"]
    assert "cannot show: 7." in panel.caption


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
@pytest.mark.parametrize("which", ["two", "many", "poisoned"])
def test_it_is_drawn_silent_offline_and_within_the_page(request, visit, columns, which, width, scheme):  # noqa: F811
    comparison = compare(columns) if which == "two" else request.getfixturevalue(which)
    page, told, asked = visit(render_html(comparison), width, color_scheme=scheme)
    assert (told, asked) == ([], [])
    lines = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.js-line').length)")
    assert lines == [len(p.figure.data) for p in panels(comparison)]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    rights = "[...document.querySelectorAll('.plot .main-svg')].map(s => s.getBoundingClientRect().right)"
    assert max(page.evaluate(rights)) <= width
    if which == "poisoned":
        assert page.evaluate("document.querySelectorAll('img, iframe, object, .plot a').length") == 0
        assert page.title() == "Driftscope comparison of 2 runs"


@pytest.mark.browser
def test_a_run_can_be_seen_alone(visit, many):  # noqa: F811
    page, told, _ = visit(render_html(many))
    opacity = "document.getElementById('plot-gap').data.map(t => t.opacity)"
    page.click(".key button[data-run='7']")
    page.wait_for_timeout(200)
    shown = page.evaluate(opacity)
    assert sorted(shown)[-2:] == [0.12, 1]
    assert page.get_attribute(".key button[data-run='7']", "aria-pressed") == "true"
    page.click(".key button[data-run='7']")
    page.wait_for_timeout(200)
    assert min(page.evaluate(opacity)) >= 0.6
    assert told == []


@pytest.mark.browser
def test_the_policy_stops_a_script_that_got_in_anyway(visit, columns):  # noqa: F811
    html = render_html(compare(columns))
    page, told, _ = visit(html.replace("</h1>", "</h1><script>document.title='owned'</script>", 1))
    assert page.title() != "owned"
    assert any("Content Security Policy" in line for line in told)
