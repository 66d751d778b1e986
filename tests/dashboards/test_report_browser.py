"""The report in a real headless Chromium: drawn, silent, offline, within its width, hostile text as text."""

from __future__ import annotations

import pytest

from driftscope.dashboards.report import render_html
from driftscope.journal import Run
from tests.dashboards.simulated import NO_VERDICT, simulated_run, verdict
from tests.dashboards.test_report import HOSTILE, poisoned_run, poisoned_verdict

pytestmark = pytest.mark.browser
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PLOTS = "() => [...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.main-svg').length > 0 ? " \
    "p.querySelectorAll('.trace, .scatterlayer .trace, .boxlayer .trace, .points .point').length : 0)"  # fmt: skip


@pytest.fixture(scope="module")
def browser(chromium):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive Chromium")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a page; gives (page, what it told the console, what it asked for besides itself)."""
    pages = []

    def go(html, width=1440, **context):
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, **context)
        pages.append(page)
        told, asked = [], []
        page.on("console", lambda m: told.append(m.text))
        page.on("pageerror", lambda e: told.append(str(e)))
        page.on("dialog", lambda d: (told.append(f"dialog {d.message}"), d.dismiss()))
        page.on("request", lambda r: asked.append(r.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        page.wait_for_timeout(150)
        return page, told, [u for u in asked if u != path.as_uri() and not u.startswith(("data:", "blob:"))]

    yield go
    for page in pages:
        page.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_every_plot_is_drawn_silent_offline_and_within_the_page(visit, width, scheme):
    page, told, asked = visit(render_html(simulated_run(), verdict()), width, color_scheme=scheme)
    drawn = page.evaluate(PLOTS)
    assert len(drawn) == 16
    assert all(n > 0 for n in drawn), drawn
    assert told == []
    assert asked == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate(
        "[...document.querySelectorAll('.plot .main-svg')].map(s => s.getBoundingClientRect().right)"
    )
    assert max(boxes) <= width


def test_sampling_drift_is_drawn_with_its_alarms(visit):
    page, told, _ = visit(render_html(simulated_run(), verdict()))
    assert told == []
    points = "id => document.querySelectorAll(`#plot-${id} .point`).length"
    assert page.evaluate(points, "drift") == 2  # the cross and the circle of one episode
    assert page.evaluate(points, "mismatch-distribution") >= 3
    bands = "document.querySelectorAll('#plot-mismatch-causes .subplot.xy .fills .js-fill').length"
    assert page.evaluate(bands) == 3
    rows = [row.inner_text().split() for row in page.query_selector_all("#sampling-drift .looks tbody tr")]
    assert rows[0][:3] == ["1", "current", "weights"]
    assert rows[-1][:3] == ["40", "older", "weights"]
    assert not page.is_visible("#table-mismatch")
    page.click(".numbers summary")
    assert page.is_visible("#table-mismatch")
    assert "rollout_corr/kl" in page.inner_text(".numbers")


def test_hostile_text_is_shown_as_text_and_runs_nothing(visit):
    page, told, asked = visit(render_html(poisoned_run(), poisoned_verdict()), 390)
    assert told == []
    assert asked == []
    assert page.evaluate("document.querySelectorAll('img, iframe, object, .plot a').length") == 0
    shown = page.inner_text("body")
    for words in HOSTILE[:4]:
        assert words in shown
    assert HOSTILE[1] in page.inner_text("h1")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_policy_stops_a_script_that_got_in_anyway(visit):
    html = render_html(Run(info=None, steps=[], alerts=[], notes=[], problems=[]), NO_VERDICT)
    page, told, _ = visit(html.replace("</h1>", "</h1><script>document.title='owned'</script>", 1))
    assert page.title() != "owned"
    assert any("Content Security Policy" in line for line in told)


def test_an_empty_run_is_a_quiet_page_without_plots(visit):
    html = render_html(Run(info=None, steps=[], alerts=[], notes=[], problems=[]), NO_VERDICT)
    page, told, asked = visit(html, 390)
    assert (told, asked) == ([], [])
    assert page.evaluate("document.querySelectorAll('.plot').length") == 0
    assert page.inner_text("body").count("Unavailable:") >= 9


def test_the_theme_follows_the_reader(visit):
    page, told, _ = visit(render_html(simulated_run(3), verdict()), color_scheme="light")
    color = "getComputedStyle(document.querySelector('#plot-gap .xtick text')).fill"
    light = page.evaluate(color)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    assert page.evaluate(color) != light
    assert told == []
