from __future__ import annotations

import json
import subprocess
import sys

import pytest

from driftscope.cli import main
from driftscope.journal import JournalWriter
from tests.record_factory import alert, honest_ratio, info, note, seed_step, step

HOSTILE = "\x1b[2Jgone\r\u202e[red]x[/red]"


def make(directory, *records, **fields):
    with JournalWriter(directory) as journal:
        journal.write_info(info(**{"run_id": directory.name, "status": "finished", **fields}))
        for record in records:
            journal.write(record)
    return str(directory)


def honest(n=12, **fields):
    return [step(step=s, is_ratio=honest_ratio(), live_grad_norm=0.3 + 0.01 * (s % 3), **fields) for s in
            range(1, n + 1)]  # fmt: skip


@pytest.fixture
def clean(tmp_path):
    return make(tmp_path / "clean", *honest(), trainer={"top_p": 1.0, "use_liger_kernel": False})


@pytest.fixture
def broken(tmp_path):
    steps = [seed_step(s, live_grad_norm=31.0) for s in range(1, 13)]
    return make(tmp_path / "broken", *steps, trainer={"top_p": 0.8, "use_liger_kernel": False})


def test_a_broken_run_and_a_clean_one(broken, clean, capsys):
    assert main(["compare", broken, clean]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    whole = " ".join(out.split())
    assert whole.startswith("clean is clean, broken has critical findings: The fused Liger path trains on gradients")
    assert "One recorded setting differs: top_p, 0.8 to 1." in whole
    assert "findings gone: DS101, DS102, DS201, DS103" in whole
    assert "118×" in out
    assert "▲ better, ×0.00847" in out
    assert "top_p (trainer)" in out
    assert "Student's t" in whole


def test_the_same_run_as_directory_and_as_file_agrees(clean, capsys):
    assert main(["compare", clean, f"{clean}/records.jsonl", clean]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("All 3 runs are clean, and no figure differs by more than what moves within the runs.")
    assert "clean (2)" in out
    assert "clean (3) is the same run as clean" in out
    assert "▲ better" not in out


@pytest.mark.parametrize(
    ("order", "level", "code"),
    [
        (("clean", "broken"), None, 0),
        (("clean", "broken"), "critical", 1),
        (("clean", "broken"), "info", 1),
        (("broken", "clean"), "info", 0),
        (("broken", "broken"), "info", 0),
    ],
)
def test_only_findings_that_the_baseline_has_not_fail(order, level, code, clean, broken):
    runs = [{"clean": clean, "broken": broken}[name] for name in order]
    assert main(["compare", *runs, *(["--fail-on", level] if level else [])]) == code


def test_a_finding_that_got_more_severe_fails_its_new_level(tmp_path):
    a, b = (make(tmp_path / s, *honest(), *(alert("DS101", s, n) for n in range(1, 9))) for s in
            ("warning", "critical"))  # fmt: skip
    assert main(["compare", a, b, "--fail-on", "critical"]) == 1
    assert main(["compare", a, b, "--fail-on", "warning"]) == 0
    assert main(["compare", b, a, "--fail-on", "info"]) == 0


def test_refused_options_fail_no_level(tmp_path, clean):
    refused = [{"option": "delta", "where": "x", "message": "y"}]
    other = make(tmp_path / "other", *honest(), refused=refused)
    assert main(["compare", clean, other, "--fail-on", "info"]) == 0


def test_the_baseline_can_be_another_run(clean, broken, capsys):
    assert main(["compare", clean, broken, "--baseline", "2", "--fail-on", "critical"]) == 0
    assert "broken (baseline)" in capsys.readouterr().out
    assert main(["compare", clean, broken, "--baseline", "3"]) == 2
    assert "--baseline 3: only 2 runs" in capsys.readouterr().err
    assert main(["compare", clean, broken, "--baseline", "0"]) == 2


def test_unreadable_runs_are_named_and_the_rest_is_compared(tmp_path, clean, broken, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "records.jsonl").write_bytes(b"")
    (tmp_path / "foreign.txt").write_text("hello\n", encoding="utf-8")
    bad = [str(tmp_path / name) for name in ("empty", "foreign.txt", "nowhere")]
    assert main(["compare", clean, *bad, broken]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("is empty", "not a Driftscope records file", "does not exist"):
        assert words in out
    assert "clean is clean, broken has critical findings" in out
    assert main(["compare", clean, *bad, clean, "--fail-on", "critical"]) == 2  # unread is not passed
    assert "could not be judged" in capsys.readouterr().err
    assert main(["compare", clean, *bad, broken, "--fail-on", "critical"]) == 1
    capsys.readouterr()
    assert main(["compare", bad[0], clean, broken]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "This was to be the baseline; the first readable run is." in out
    assert "clean (baseline)" in out


def test_fewer_than_two_readable_runs_are_wrong_use(tmp_path, clean, capsys):
    for arguments, said in (
        ([clean], "needs two runs"),
        ([], "Missing argument"),
        ([clean, str(tmp_path / "no")], "1 of 2 runs can be read"),
        ([str(tmp_path / "no"), str(tmp_path / "no2"), "--json"], "0 of 2 runs can be read"),
    ):
        assert main(["compare", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert "Traceback" not in err


def test_a_run_in_which_nothing_was_measured_never_passes(tmp_path, clean, capsys):
    light = make(tmp_path / "light", step(tier="light", gap=None, paths={}, residual=None, unexplained=None), note())
    assert main(["compare", clean, light]) == 0
    assert "nothing was measured in light" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", clean, light, "--fail-on", "critical"]) == 2


def test_json_is_one_object_with_everything(broken, clean, capsys):
    assert main(["compare", broken, clean, f"{clean}/none", "--json", "--fail-on", "critical"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert [run["label"] for run in data["runs"]] == ["broken", "clean"]
    assert [run["level"] for run in data["runs"]] == ["critical", "clean"]
    assert (data["baseline"], data["fail_on"], data["exit_code"]) == (0, "critical", 2)
    assert data["settings"] == [{"section": "Trainer", "name": "top_p", "values": ["0.8", "1"]}]
    figures = {row["id"]: row["runs"] for row in data["figures"]}
    assert figures["gap"][1]["mark"] == "better"
    assert figures["gap"][1]["change"] == pytest.approx(1 / 118)
    assert figures["gap"][1]["pairs"] == 12
    assert figures["gap"][0] == {
        "value": 118.0, "change": None, "bar": None, "pairs": 0, "independent": 0.0, "mark": "baseline",
    }  # fmt: skip
    findings = {row["rule"]: row["runs"] for row in data["findings"]}
    assert findings["DS201"][1]["change"] == "gone"
    assert len(data["skipped"]) == 1


def test_many_runs_get_an_overview_and_a_pointer(tmp_path, clean, broken, capsys):
    assert main(["compare", *[clean, broken] * 25]) == 0
    out = capsys.readouterr().out
    assert "25 of 50 runs have no warning" in " ".join(out.split())
    assert "--html FILE, or --json" in out
    assert "Figures, medians" not in out
    assert all(len(line) <= 110 for line in out.splitlines())


def test_text_in_run_data_cannot_steer_the_terminal(tmp_path, clean, capsys):
    hostile = make(
        tmp_path / "bad\x1b[31m name", *honest(unavailable={HOSTILE: HOSTILE}), alert(title=HOSTILE, rule=HOSTILE),
        trainer={HOSTILE: HOSTILE}, versions={"trl": HOSTILE}, status="running",
    )  # fmt: skip
    assert main(["compare", clean, hostile]) == 0
    out = capsys.readouterr().out
    assert "gone" in out
    assert "[red]x[/red]" in out  # rich's markup is text
    assert not any(c in out for c in "\x1b\r\u202e")
    assert main(["compare", clean, hostile, "--json"]) == 0
    assert not any(c in capsys.readouterr().out for c in "\x1b\r\u202e")


def test_the_page_is_written_and_its_path_told(tmp_path, clean, broken, capsys):
    page = tmp_path / "deep" / "page.html"
    assert main(["compare", clean, broken, "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith(str(page))
    first = page.read_bytes()
    assert main(["compare", clean, broken, "--html", str(page), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["baseline"] == 0
    assert err.strip() == str(page)
    assert page.read_bytes() == first
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["compare", clean, broken, "--html", str(tmp_path / "file" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_compare_loads_no_training_stack_and_plotly_only_for_the_page(clean, broken, tmp_path):
    code = (
        "import sys; from driftscope.cli import main; assert main(['compare', *sys.argv[1:]]) == 0;"
        "bad = {'torch', 'trl', 'transformers', 'liger_kernel'} & set(sys.modules); assert not bad;"
        "assert ('plotly' in sys.modules) == ('--html' in sys.argv)"
    )
    for more in ([], ["--html", str(tmp_path / "page.html")]):
        subprocess.run([sys.executable, "-c", code, clean, broken, *more], check=True, capture_output=True)
