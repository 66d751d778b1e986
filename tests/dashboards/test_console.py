from __future__ import annotations

import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from tqdm import tqdm

from driftscope.dashboards.console import ConsoleReporter
from driftscope.records import AlertRecord, NoteRecord, RunInfo

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "[red]x[/red] :boom: </script> \x1b[31mred\x1b[0m \u202eltr [/] [link=http://a]b[/link]"


def alert(step=1, severity="critical", **fields):
    base = {"rule": "DS101", "title": "The ratio is dropped", "evidence": "gap 107x, " * 20, "remedy": "Set top_p=1."}
    return AlertRecord(step=step, severity=severity, **(base | fields))


def reporter(terminal=False, width=80, **options):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system="standard" if terminal else None)
    return ConsoleReporter(console, clock=lambda: 0.0, **options), out


def test_the_first_alert_has_title_evidence_remedy_and_documentation():
    report, out = reporter()
    report.alert(alert(1200))
    text = out.getvalue()
    assert text.startswith("[driftscope step 1,200] CRITICAL DS101 The ratio is dropped\n")
    for words in ("    evidence: gap 107x", "    remedy: Set top_p=1.", "    docs: docs/rules/DS101.md"):
        assert words in text


def test_a_log_file_is_plain_wrapped_and_never_cuts_a_word():
    report, out = reporter()
    long_word = "w" * 300
    report.alert(alert(evidence=f"{'word ' * 60}{long_word} end"))
    text = out.getvalue()
    assert "\x1b" not in text
    assert text.isascii()
    assert long_word in text
    assert "…" not in text
    assert all(len(line) <= 110 for line in text.splitlines() if long_word not in line)


def test_a_terminal_gets_colour_and_its_own_width():
    report, out = reporter(terminal=True, width=60)
    report.alert(alert())
    plain = Console(file=io.StringIO(), width=200)
    assert "\x1b[1;31mCRITICAL" in out.getvalue()
    lines = [plain.render_str("").from_ansi(line).plain for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 59


@pytest.mark.parametrize("terminal", [False, True])
def test_hostile_run_data_are_text(terminal):
    report, out = reporter(terminal=terminal, width=400)
    report.alert(alert(title=HOSTILE, evidence=HOSTILE, remedy=HOSTILE, rule="[b]DS"))
    report.note(NoteRecord(step=1, stage="[red]", message=HOSTILE))
    report.started(RunInfo(run_id=HOSTILE, created=0, driftscope="1", versions={"[b]x": "[/b]"}))
    report.finished(HOSTILE, "/runs/[red]x")
    text = out.getvalue()
    assert text.count("[red]x[/red] :boom: </script>") >= 5
    assert "\x1b[31m" not in text
    assert "\u202e" not in text
    assert "/runs/[red]x" in text


def test_repeats_are_a_line_with_the_count():
    report, out = reporter()
    for step in range(1, 13):
        report.alert(alert(step))
    lines = out.getvalue().splitlines()
    assert lines[-1] == "[driftscope step 11] CRITICAL DS101 The ratio is dropped (again: 11 times so far)"
    assert sum("evidence:" in line for line in lines) == 1


def test_the_end_names_every_rule_and_the_records():
    report, out = reporter()
    report.alert(alert(2, severity="warning", rule="DS102"))
    for step in range(1, 41):
        report.alert(alert(step))
    report.finished("Critical: the gradient is 107 times too large", "runs/demo")
    tail = out.getvalue().splitlines()[-4:]
    assert tail == [
        "[driftscope] Critical: the gradient is 107 times too large",
        "    critical DS101: 40 alerts, steps 1 to 40",
        "    warning DS102: 1 alert, step 2",
        "    records: runs/demo",
    ]


def test_the_end_says_what_makes_the_ratio():
    report, out = reporter()
    line = "IS ratio 0.0049: truncated sampling 100%, engine noise 0%"
    report.finished("Critical: x", "runs/demo", line)
    assert out.getvalue().splitlines() == ["[driftscope] Critical: x", f"    {line}", "    records: runs/demo"]
    report.finished("y", "z", HOSTILE)
    assert "[red]x[/red] :boom:" in out.getvalue()
    assert "\x1b[31m" not in out.getvalue()


def test_the_same_note_is_told_three_times_at_most():
    report, out = reporter()
    for step in range(10):
        report.note(NoteRecord(step=step, stage="shadow", message="off"))
    report.note(NoteRecord(step=3, stage="head", message="other"))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[2].endswith("(further notes of this kind go to the records only)")


def test_a_rank_other_than_the_first_is_named():
    report, out = reporter()
    report.alert(alert(rank=3))
    assert out.getvalue().startswith("[driftscope step 1 rank 3] ")


def test_a_closed_stream_is_left_alone():
    report, out = reporter()
    out.close()
    report.alert(alert())
    report.finished("x", "y")


def test_a_stream_that_lacks_a_letter_gets_an_escape():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleReporter(Console(file=stream)).alert(alert(title="107× too large"))
    stream.flush()
    assert b"107\\xd7 too large" in raw.getvalue()


def test_a_progress_bar_is_cleared_before_and_drawn_after(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = tqdm(total=10, file=screen, ncols=60, mininterval=0)
    bar.update(3)
    ConsoleReporter(Console(stderr=True, width=80)).alert(alert())
    bar.close()
    visible = [line.rsplit("\r", 1)[-1] for line in screen.getvalue().split("\n")]
    heads = [line for line in visible if "CRITICAL" in line]
    assert len(heads) == 1
    assert heads[0].startswith("[driftscope step 1]")
    assert "30%" in screen.getvalue().split("docs/rules/DS101.md")[-1]


def test_without_tqdm_nothing_imports_it_nor_plotly():
    code = (
        "import sys; from driftscope.dashboards import ConsoleReporter; from driftscope.records import AlertRecord;"
        "fields = dict(rule='DS1', severity='info', title='t', evidence='e', remedy='r');"
        "ConsoleReporter().alert(AlertRecord(step=1, **fields));"
        "sys.exit(any(m in sys.modules for m in ('tqdm', 'plotly', 'torch', 'jinja2')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "INFO DS1 t" in done.stderr
    assert done.stdout == ""


def test_threads_may_share_a_reporter():
    report, out = reporter()
    threads = [threading.Thread(target=report.alert, args=(alert(rule=f"DS{i}"),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out.getvalue().count("CRITICAL") == 8
