from __future__ import annotations

import json
import subprocess
import sys

import pytest

from driftscope.cli import main
from driftscope.journal import JournalWriter
from tests.record_factory import alert, honest_ratio, info, note, seed_step, step


def make(directory, *records, **fields):
    with JournalWriter(directory) as journal:
        journal.write_info(info(**fields))
        for record in records:
            journal.write(record)
    return str(directory)


@pytest.fixture
def broken(tmp_path):
    return make(tmp_path / "broken", seed_step(1), seed_step(2), trainer={"top_p": 0.8})


@pytest.fixture
def honest(tmp_path):
    return make(tmp_path / "honest", step(is_ratio=honest_ratio()))


def test_a_broken_run_exits_with_findings(broken, capsys):
    assert main(["check", broken, "--fail-on", "critical"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("CRITICAL: The fused Liger path trains on gradients about 118x larger")
    assert any(line.startswith("What to do: First set top_p=1.0") for line in lines)
    findings = [line.split()[:2] for line in lines if line.split()[1].startswith("DS")]
    assert ["critical", "DS201"] in findings
    assert ["critical", "DS102"] in findings
    assert "[2 steps, first 1]" in out


def test_an_honest_run_is_clean(honest, capsys):
    for level in ("info", "warning", "critical"):
        assert main(["check", honest, "--fail-on", level]) == 0
    assert capsys.readouterr().out.startswith("CLEAN: ")


def test_the_level_decides(tmp_path):
    path = make(tmp_path, step(is_ratio=honest_ratio()), alert(severity="warning"))
    assert main(["check", path, "--fail-on", "info"]) == 1
    assert main(["check", path]) == 1
    assert main(["check", path, "--fail-on", "critical"]) == 0


def test_a_bad_shadow_beside_an_honest_live_path_passes(tmp_path):
    path = make(
        tmp_path, step(ratio=50.0, live="reference", causes=[("normalizer", 1.0, 50.0)], is_ratio=honest_ratio())
    )
    assert main(["check", path]) == 0
    assert main(["check", path, "--fail-on", "info"]) == 1


def test_refused_options_fail_no_level(tmp_path):
    refused = [{"option": "delta", "where": "x", "message": "y"}]
    assert main(["check", make(tmp_path, step(is_ratio=honest_ratio()), refused=refused), "--fail-on", "info"]) == 0


def test_the_records_file_itself_is_accepted(broken):
    assert main(["check", f"{broken}/records.jsonl"]) == 1


def test_json_is_one_object_with_everything(broken, capsys):
    assert main(["check", broken, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["level"] == "critical"
    assert data["exit_code"] == 1
    assert data["fail_on"] == "warning"
    assert data["run_id"] == "abc"
    assert data["steps"] == 2
    assert data["problems"] == []
    assert {"rule", "severity", "title", "evidence", "remedy", "first_step", "count"} == set(data["findings"][0])


def test_nothing_measured_is_not_a_pass(tmp_path, capsys):
    path = make(tmp_path, step(tier="light", gap=None, paths={}, residual=None, unexplained=None), note())
    assert main(["check", path, "--fail-on", "critical"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("UNAVAILABLE: ")
    assert "nothing was measured" in err
    assert main(["check", path, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["level"] == "unavailable"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no records.jsonl"),
        (b"", "is empty"),
        (b"hello\n", "not a Driftscope records file"),
        (b'{"kind":"step","schema":99}\n', "schema version 99 is unknown"),
        (b'{"kind":"step","sch', "no complete record"),
    ],
)
def test_unreadable_input_is_wrong_use_without_a_traceback(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "records.jsonl").write_bytes(content)
    for arguments in (["check", str(tmp_path)], ["check", str(tmp_path), "--json"], ["report", str(tmp_path)]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert "Traceback" not in err
    assert not (tmp_path / "report.html").exists()


def test_a_missing_run_is_wrong_use(tmp_path, capsys):
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_hostile_text_cannot_steer_the_terminal(tmp_path, capsys):
    path = make(tmp_path, step(is_ratio=honest_ratio()), alert(title="\x1b[2Jgone\n\r", evidence="\u202eabc"))
    assert main(["check", path]) == 1
    out = capsys.readouterr().out
    assert "gone" in out
    assert not any(c in out for c in "\x1b\r\u202e")


def test_torn_and_damaged_lines_are_told_and_judged(broken, capsys):
    with open(f"{broken}/records.jsonl", "ab") as stream:
        stream.write(b"x\n{")
    assert main(["check", broken]) == 1
    out = capsys.readouterr().out
    assert "1 damaged line skipped (line 3)" in out
    assert "The last line (4) is incomplete" in out


def test_check_loads_no_training_stack(broken):
    code = (
        "import sys; from driftscope.cli import main; assert main(['check', sys.argv[1]]) == 1;"
        "bad = {'torch', 'trl', 'transformers', 'plotly', 'liger_kernel'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, broken], check=True, capture_output=True)


def test_a_reader_that_goes_away_is_no_error(broken):
    # The read end of the pipe is closed before anything is written.
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1);"
        "from driftscope.cli import main; sys.exit(main(['check', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, broken], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
