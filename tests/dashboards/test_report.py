from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from driftscope.dashboards import view
from driftscope.dashboards.report import _ESCAPES, json_for_script, render, render_html
from driftscope.errors import RecordError, RunDirectoryError
from driftscope.journal import JournalWriter, Run
from driftscope.records import AlertRecord, StepRecord
from driftscope.verdict import FindingSummary, Verdict
from tests.dashboards.simulated import NO_VERDICT, simulated_run, step_record, verdict

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "{{7*7}}{% include 'x' %}",
    "[red]bold[/red]",
    "\u2028\u202e\x1b[2J\x00\"'`&amp;",
    "<!--<script>",
]
ALL = "|".join(HOSTILE)
CHOICES = {"kind", "severity", "status", "level", "tier", "source", "schema"}
CHOICES |= {"agrees_with", "state"}
CHOICES |= {"live", "candidate", "reference", "live_head", "mode"}  # poisoned in a record of their own


@pytest.fixture(scope="module")
def html():
    return render_html(simulated_run(), verdict())


def poisoned(value, key=""):
    """Every string of a JSON value replaced by hostile text, except the fields that hold one of a few known words."""
    if isinstance(value, dict):
        out = {k: poisoned(v, k) for k, v in value.items()}
        if key in ("versions", "model", "trainer", "spec", "unavailable", "paths", "drift", "distances"):
            copied = key in ("paths", "drift", "distances")
            if out or not copied:
                out[ALL] = next(iter(out.values())) if copied else ALL
        return out
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return ALL if isinstance(value, str) and key not in CHOICES else value


def poisoned_run(n=3):
    run = simulated_run(n)
    steps = [s.model_copy(update={"unavailable": {"x": "y"}, "nonfinite": ["z"]}) for s in run.steps]
    part = {"agrees_with": "part", "stale_modules": ["a", "b"], "note": "c"}
    steps[-4] = steps[-4].model_copy(update={"canary": steps[-4].canary.model_copy(update=part)})
    steps.append(steps[-1].model_copy(update={"step": n + 1, "live": ALL, "live_head": ALL}))
    load = lambda record: type(record).model_validate(poisoned(record.model_dump(by_alias=True)))  # noqa: E731
    return Run(
        info=load(run.info),
        steps=[load(s) for s in steps],
        alerts=[load(a) for a in run.alerts],
        notes=[load(a) for a in run.notes],
        problems=[ALL],
    )


def poisoned_verdict():
    return Verdict(
        level="critical",
        headline=ALL,
        summary=[ALL, ALL],
        first_action=ALL,
        findings=[FindingSummary(ALL + "2", "critical", ALL, ALL, ALL, 1, 3)],
    )


class Outline(HTMLParser):
    """Start tags, the attributes that matter for safety, and what stands in each script element."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text, self._in = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "script":
            self.scripts.append(data)
        else:
            self.text.append(data)


def test_same_records_give_the_same_bytes(html):
    assert html == render_html(simulated_run(), verdict())


def test_another_process_gives_the_same_bytes(html):
    """No dependence on hash seeds, clocks or import order."""
    code = (
        "import hashlib; from driftscope.dashboards import render_html;"
        "from tests.dashboards.simulated import simulated_run, verdict;"
        "print(hashlib.sha256(render_html(simulated_run(), verdict()).encode()).hexdigest())"
    )
    root = Path(__file__).resolve().parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def written(run, run_dir):
    with JournalWriter(run_dir) as journal:
        journal.write_info(run.info)
        for record in [*run.steps, *run.alerts, *run.notes]:
            journal.write(record)
    return run_dir


def test_render_reads_the_run_and_writes_the_page_beside_it(tmp_path):
    run_dir = written(simulated_run(2), tmp_path / "run")
    path = render(run_dir)
    assert path == run_dir / "report.html"
    first = path.read_bytes()
    assert b"demo-7" in first
    assert render(run_dir, tmp_path / "deep" / "er.html").read_bytes() == first
    assert render(run_dir / "records.jsonl") == path
    assert sorted(p.name for p in run_dir.iterdir()) == ["records.jsonl", "report.html", "run.json"]


def test_render_says_why_it_cannot_write_or_read(tmp_path):
    run_dir = written(simulated_run(1), tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        render(run_dir, run_dir / "run.json" / "report.html")
    with pytest.raises(RecordError):
        render(tmp_path / "nothing")


def test_sections_stand_in_the_order_of_need(html):
    sections = ("paths", "why", "ratio", "sampling-drift", "ledger", "findings", "setup", "health", "glossary")
    marks = ["verdict-title", "What to do first", 'class="tiles"', *(f'<section id="{name}"' for name in sections)]
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)


def test_the_page_names_no_network_address_outside_plotly(html):
    outline = Outline(html)
    links = [v for _, attrs in outline.tags for k, v in attrs.items() if k in ("src", "href")]
    assert links
    assert [v for v in links if not v.startswith(("#", "data:"))] == []
    policy = next(a["content"] for t, a in outline.tags if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert html.count("plotly.js v") == 1


def test_numbers_tables_and_refusals_are_in_the_text(html):
    text = " ".join(" ".join(Outline(html).text).split())
    for words in ("Liger (fused), trains", "DS101", "docs/rules/DS101.md", "refused together with", "0.27.2"):
        assert words in text
    for words in ("not installed", "40 alerts, steps 1 to 40", "34 more"):
        assert words in text
    assert "No GPU: the kernel probe is off." in text


def test_hostile_text_in_every_field_stays_text():
    page = render_html(poisoned_run(), poisoned_verdict())
    outline = Outline(page)
    tags = [t for t, _ in outline.tags]
    clean_tags = [t for t, _ in Outline(render_html(simulated_run(3), verdict())).tags]
    assert set(tags) == set(clean_tags)
    assert "img" not in tags
    data = [a for t, a in outline.tags if t == "script" and a.get("type") == "application/json"]
    assert tags.count("script") == len(data) + 2
    assert not any(k.startswith("on") for _, attrs in outline.tags for k in attrs)
    text = "".join(outline.text)
    for words in HOSTILE[:4]:
        assert text.count(words) > 10
    assert not re.search("[\x00\x1b\u2028\u202e]", page)


def test_figure_data_parse_and_cannot_close_their_element():
    page = render_html(poisoned_run(), poisoned_verdict())
    blocks = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        assert not set(block) & {chr(c) for c in _ESCAPES}
        figure = json.loads(block)
        assert set(figure) >= {"data", "layout"}
    labels = json.dumps([json.loads(b) for b in blocks])
    assert "&lt;" in labels


def test_the_door_writes_json_that_reads_back():
    value = {"b": [1.0, float("nan"), None, True, 1 / 3], "a": "</script>&'\u2028<!--"}
    text = str(json_for_script(value))
    assert "<" not in text
    assert json.loads(text) == {"a": "</script>&'\ufffd<!--", "b": [1.0, None, None, True, 0.3333333]}
    assert text.startswith('{"a"')


@pytest.mark.parametrize(
    "run",
    [
        Run(info=None, steps=[], alerts=[], notes=[], problems=["records.jsonl is empty"]),
        Run(info=None, steps=[StepRecord(step=1, micro_step=0, live="liger")], alerts=[], notes=[], problems=[]),
        Run(info=None, steps=[step_record(1)], alerts=[], notes=[], problems=[]),
    ],
    ids=["empty", "all None", "one step"],
)
def test_poor_runs_still_give_a_page(run):
    page = render_html(run, NO_VERDICT)
    assert "No verdict" in page
    text = " ".join("".join(Outline(page).text).split())
    assert "None" not in text
    assert "nan" not in text.split()
    assert ("Unavailable:" in text) is not bool(run.steps and run.steps[0].paths) or "run.json" in text
    if run.problems:
        assert "records.jsonl is empty" in text


def test_rules_are_gathered_the_worst_first_with_findings_that_have_no_alert():
    alerts = [AlertRecord(step=s, rule="DS2", severity=v, title=v, evidence=f"e{s}", remedy="r") for s, v in
              ((1, "info"), (2, "critical"), (3, "warning"))]  # fmt: skip
    run = Run(info=None, steps=[], alerts=alerts, notes=[], problems=[])
    extra = FindingSummary("DS1", "warning", "t", "e", "r", 5, 2)
    groups = view.rule_groups(run, replace(NO_VERDICT, findings=[extra]))
    assert [(g.rule, g.severity, g.title) for g in groups] == [
        ("DS2", "critical", "critical"),
        ("DS1", "warning", "t"),
    ]
    assert groups[0].when == "3 alerts, steps 1 to 3"
    assert groups[1].when == "2 times, first at step 5"


def test_thresholds_come_from_the_runs_own_settings():
    panel = view.panels(simulated_run(2).steps, {"gap_warning": 3.0, "gap_critical": 40})["gap"]
    assert "amber begins at 3×" in panel.caption
    assert "40×" in panel.caption
    assert "1.5×" in view.panels(simulated_run(2).steps, {"gap_warning": "oops"})["gap"].caption


def test_a_long_run_stays_light(html):
    steps = [s.model_copy(update={"step": i + 1, "micro_step": 0}) for i, s in enumerate(simulated_run(10).steps * 80)]
    page = render_html(Run(info=None, steps=steps, alerts=[], notes=[], problems=[]), verdict())
    assert len(steps) == 3200
    assert len(page) < 5_600_000


def test_trouble_is_counted_once_per_kind():
    steps = [
        StepRecord(step=s, micro_step=0, live="liger", unavailable={"kept_mass": "top_k"}, nonfinite=["loss"])
        for s in (1, 2, 9)
    ]
    rows = view.troubles(Run(info=None, steps=steps, alerts=[], notes=[], problems=["torn"]))
    assert rows == [
        ("records", "torn", ""),
        ("kept_mass", "Unavailable: top_k", "3 times, steps 1 to 9"),
        ("loss", "Not a finite number (NaN or infinite).", "3 times, steps 1 to 9"),
    ]
