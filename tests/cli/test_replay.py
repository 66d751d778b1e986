from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from driftscope.capsule import write_capsule
from driftscope.capsule.format import JSON_NAME, TENSORS_NAME
from driftscope.cli import main
from tests.capsule.sample import BROKEN, reseal, sample
from tests.record_factory import alert, info


@pytest.fixture
def honest(tmp_path):
    return write_capsule(tmp_path / "honest", sample())


@pytest.fixture
def broken(tmp_path):
    return write_capsule(tmp_path / "broken", sample(live_spec=BROKEN, mismatch=3.0))


def test_an_honest_capsule_is_clean(honest, capsys):
    assert main(["replay", str(honest), "--fail-on", "info"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("CLEAN: ") and err == ""
    assert "figures and every finding came out the same to rounding" in out


def test_a_broken_one_exits_with_its_findings(broken, capsys):
    assert main(["replay", str(broken)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("CRITICAL: The fused Liger path trains on gradients about 20")
    assert "critical DS102" in out
    assert "came out the same" in out


def test_numbers_that_differ_are_told(honest, capsys):
    def double(tensors):
        tensors["hidden_grad"] *= 1.001

    assert main(["replay", str(reseal(honest, change_tensors=double)), "--fail-on", "critical"]) == 1
    out = capsys.readouterr().out
    assert "NOT THE SAME" in out
    assert "paths.liger.hidden_grad_norm: saved" in out


def test_json(broken, capsys):
    assert main(["replay", str(broken / JSON_NAME), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["same"] is True and document["exit_code"] == 1 and document["level"] == "critical"
    assert document["figures"]["differing"] == 0 and document["figures"]["compared"] > 100
    assert document["record"]["gap"]["grad_norm_ratio"] > 10
    assert document["tensors"]["rows"] == document["tensors"]["rows_with_hidden_states"] == 22


def test_an_alert_over_many_steps_is_carried(tmp_path, capsys):
    made = replace(sample(), alarm=[alert(rule="ZZ999", severity="critical")])
    path = write_capsule(tmp_path / "c", made)
    assert main(["replay", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["same"] and [a["rule"] for a in document["carried"]] == ["ZZ999"]


@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_a_damaged_one_is_an_error_without_a_traceback(honest, name, capsys):
    file = honest / name
    file.write_bytes(file.read_bytes()[:-40])
    assert main(["replay", str(honest)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("driftscope: ") and "damaged" in err and "Traceback" not in err


def test_no_capsule(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "there is no capsule.json" in capsys.readouterr().err


def test_the_page(broken, tmp_path, capsys):
    page = tmp_path / "out" / "page.html"
    assert main(["replay", str(broken), "--report", str(page)]) == 1
    assert str(page) in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert "The fused Liger path trains on gradients about 20" in html
    assert "Stack:" in html and "torch 2.13.0" in html
    assert "head.weight" in html and "float32 (29, 8)" in html
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    first = page.read_bytes()
    main(["replay", str(broken), "--report", str(page)])
    assert page.read_bytes() == first


def test_the_page_escapes_what_a_capsule_says(tmp_path):
    hostile = "<script>alert(1)</script>\x1b[31m"
    made = replace(
        sample(), why=hostile, notes=[hostile], info=info(run_id=hostile, versions={"torch": hostile}, device=hostile)
    )
    path = write_capsule(tmp_path / "c", made)
    page = tmp_path / "page.html"
    main(["replay", str(path), "--report", str(page)])
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html and "\x1b" not in html
    assert "&lt;script&gt;" in html


def test_a_page_that_cannot_be_written(honest, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["replay", str(honest), "--report", str(tmp_path / "file" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


BLOCKED = ("trl", "transformers", "accelerate", "peft", "liger_kernel", "datasets")


def test_it_needs_no_trainer(broken):
    code = (
        "import sys\n"
        f"for name in {BLOCKED!r}: sys.modules[name] = None\n"
        "from driftscope.cli import main\n"
        f"sys.exit(main(['replay', {str(broken)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "came out the same to rounding" in done.stdout


@pytest.mark.parametrize(("package", "message"), [("torch", "computes with torch"), ("safetensors", "as safetensors")])
def test_a_package_that_is_missing_is_named(broken, package, message):
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from driftscope.cli import main\n"
        f"sys.exit(main(['replay', {str(broken)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
