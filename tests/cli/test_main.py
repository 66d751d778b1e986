from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

import driftscope
from driftscope.cli import main
from driftscope.errors import UsageError
from driftscope.journal import JournalWriter
from tests.record_factory import info, seed_step


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert driftscope.__version__ in capsys.readouterr().out
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in ("check", "demo", "report"):
        assert verb in out


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["check"], ["check", ".", "--fail-on", "never"], ["check", ".", "--nope"],
     ["demo", "--live", "none"], ["demo", "--top-p", "0"], ["demo", "--top-p", "2"], ["demo", "--steps", "0"]],
)  # fmt: skip
def test_wrong_use_is_two_and_on_stderr(arguments, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Usage: driftscope" in err


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "driftscope", "check", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def demo_module(monkeypatch):
    """A stand-in for the training side: it writes what a run writes, and records how it was called."""
    module = types.ModuleType("driftscope.hooks.demo")
    module.calls = []

    def run_demo(out, steps, seed, live, top_p, mode):
        module.calls.append((out, steps, seed, live, top_p))
        with JournalWriter(out) as journal:
            journal.write_info(info())
            journal.write(seed_step())
        return out

    module.run_demo = run_demo
    monkeypatch.setitem(sys.modules, "driftscope.hooks.demo", module)
    return module


@pytest.fixture
def rendered(monkeypatch):
    """A stand-in for the report's renderer."""
    module = types.ModuleType("driftscope.dashboards.report")
    module.calls = []

    def render(run_dir, out=None):
        module.calls.append((run_dir, out))
        return out or run_dir / "report.html"

    module.render = render
    monkeypatch.setitem(sys.modules, "driftscope.dashboards.report", module)
    return module


def test_demo_passes_its_options_and_says_where_the_report_is(demo_module, rendered, tmp_path, capsys):
    out = tmp_path / "demo"
    options = ["--steps", "3", "--seed", "7", "--live", "reference", "--top-p", "1"]
    assert main(["demo", "--out", str(out), *options]) == 0
    assert demo_module.calls == [(out, 3, 7, "reference", 1.0)]
    text = capsys.readouterr().out
    assert "118x larger" in text
    assert f"Report: {out / 'report.html'}" in text


def test_demo_defaults(demo_module, rendered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    assert demo_module.calls == [(Path("runs/demo"), 40, 0, "liger", 0.8)]


def test_demo_without_the_training_stack_names_the_extra(demo_module, capsys):
    def run_demo(**_):
        raise ModuleNotFoundError("No module named 'trl.trainer'", name="trl.trainer")

    demo_module.run_demo = run_demo
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert "'trl' is not installed" in err
    assert "driftscope[trl,liger]" in err
    assert "Traceback" not in err


def test_demo_does_not_hide_a_missing_module_of_its_own(demo_module):
    def run_demo(**_):
        raise ModuleNotFoundError("No module named 'driftscope.nowhere'", name="driftscope.nowhere")

    demo_module.run_demo = run_demo
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


def test_errors_raised_on_purpose_are_told(demo_module, capsys):
    def run_demo(**_):
        raise UsageError("live='liger': no Liger loss here.")

    demo_module.run_demo = run_demo
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "driftscope: live='liger': no Liger loss here.\n"


def test_an_interrupt_is_told(demo_module, capsys):
    def run_demo(**_):
        raise KeyboardInterrupt

    demo_module.run_demo = run_demo
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_report_takes_a_directory_or_its_records(rendered, tmp_path, capsys):
    with JournalWriter(tmp_path) as journal:
        journal.write(seed_step())
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path / "records.jsonl"), "--out", str(tmp_path / "x.html")]) == 0
    assert rendered.calls == [(tmp_path, None), (tmp_path, tmp_path / "x.html")]
    assert str(tmp_path / "report.html") in capsys.readouterr().out


def test_a_reader_that_goes_away_early_is_no_finding(tmp_path):
    """``driftscope check RUN | head -1`` on a run without findings is not exit code 1."""
    code = (
        "import os, sys\n"
        "read, write = os.pipe()\n"
        "os.dup2(write, 1)\n"
        "os.close(read)\n"
        "os.close(write)\n"
        "from driftscope.cli import main\n"
        "raise SystemExit(main(['doctor', '--explain', 'DS201']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
