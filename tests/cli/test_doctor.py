"""``driftscope doctor``: what it prints, what it exits with, and what it says to bad input. Real TRL throughout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from driftscope.cli import main
from driftscope.hooks.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
SAFE = {"num_generations": 8, "per_device_train_batch_size": 8, "bf16": "false", "max_completion_length": 64}


def yaml(directory: Path, **values: Any) -> str:
    path = directory / "run.yaml"
    path.write_text("".join(f"{k}: {v}\n" for k, v in values.items()), encoding="utf-8")
    return str(path)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_biased_sampler_is_found_and_the_command_line_overrides_the_file(tmp_path, capsys):
    config = yaml(tmp_path, use_vllm="true", top_p=0.8, **SAFE)
    assert main(["doctor", "--config", config, "--no-stack", "--json"]) == 1
    found = document(capsys)
    assert "DS201" in [f["rule"] for f in found["findings"]]
    assert found["exit_code"] == 1
    assert found["settings"]["given"]["top_p"] == 0.8
    assert "model" in found["unavailable"]  # none was named, and that is said
    assert main(["doctor", "trl", "grpo", "--config", config, "--top_p", "1.0", "--no-stack", "--json"]) == 0
    found = document(capsys)
    assert found["settings"]["given"]["top_p"] == 1.0
    assert all(f["severity"] == "info" for f in found["findings"])


def test_the_stack_and_a_copy_of_the_model_are_measured(tmp_path, capsys, stack):
    save_tiny(tmp_path / "model", "gemma2")
    config = yaml(tmp_path, model_name_or_path=tmp_path / "model", use_liger_kernel="true", use_peft="true", **SAFE)
    code = main(["doctor", "--config", config, "--json"])
    found = document(capsys)
    assert found["unavailable"] == {}
    assert found["failed_rules"] == {}
    assert found["flow"]["missing"] == []
    assert found["flow"]["trainable"] > 0
    assert found["model"]["copy"] is True
    assert found["model"]["model_type"] == "gemma2"
    rows = {(r["feature"], r["path"]): r["status"] for r in found["stack"]["rows"]}
    assert rows["is_correction", "reference"] == "honoured"
    rules = [f["rule"] for f in found["findings"]]
    if stack.has_liger_loss:  # the softcap of Gemma 2
        assert code == 1
        assert found["stack"]["live"] == "liger"
        assert rows["logit_softcap", "liger"] == "dropped"
        assert "DS107" in rules
    else:
        assert code == 0
        assert found["stack"]["live"] == "reference"
        assert "DS107" not in rules


def test_rules_are_selected_and_ignored(tmp_path, capsys):
    config = yaml(tmp_path, use_vllm="true", top_p=0.8, **SAFE)
    base = ["doctor", "--config", config, "--no-stack", "--json"]
    assert main([*base, "--ignore", "DS201"]) == 0
    assert "DS201" not in [f["rule"] for f in document(capsys)["findings"]]
    assert main([*base, "--select", "DS2"]) == 1
    assert {f["rule"][:3] for f in document(capsys)["findings"]} == {"DS2"}
    assert main([*base, "--fail-on", "critical", "--select", "DS206"]) == 0


def test_what_trl_refuses_is_told_in_its_own_words(tmp_path, capsys):
    config = yaml(tmp_path, num_generations=3, per_device_train_batch_size=4, bf16="false")
    assert main(["doctor", "--config", config, "--no-stack", "--json"]) == 1
    (finding,) = (f for f in document(capsys)["findings"] if f["rule"] == "DS116")
    assert finding["severity"] == "critical"
    assert "num_generations" in finding["evidence"]
    assert main(["doctor", "--config", config, "--num_generations", "4", "--no-stack", "--json"]) == 0
    assert "DS116" not in [f["rule"] for f in document(capsys)["findings"]]


def test_text_for_people(tmp_path, capsys):
    assert main(["doctor", "--config", yaml(tmp_path, use_vllm="true", top_p=0.8, **SAFE), "--no-stack"]) == 1
    text = capsys.readouterr().out
    assert "DS201" in text
    assert "remedy: Set top_p=1.0" in text
    assert "unavailable: model" in text


@pytest.mark.parametrize("code", ["DS301", "ds201"])
def test_a_rule_is_explained_from_its_own_page(capsys, code):
    assert main(["doctor", "--explain", code]) == 0
    page = (ROOT / "docs" / "rules" / f"{code.upper()}.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ("top_p: [0.8", [], "run.yaml"),
        ("- a\n- b\n", [], "mapping"),
        ("topp: 0.8\n", [], "top_p"),
        ("top_p: much\n", [], "top_p"),
        ("top_p: 0.8\n", ["--temprature", "0.7"], "temperature"),
        ("top_p: 0.8\n", ["--select", "DS99"], "no rule or group"),
        ("top_p: 0.8\n", ["--explain", "DS99"], "no such rule"),
        ("top_p: 0.8\n", ["trl", "gpro"], "grpo"),
        (None, [], "run.yaml"),
    ],
)
def test_bad_input_gets_one_clear_message(tmp_path, capsys, content, arguments, words):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["doctor", "--config", str(path), "--no-stack", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) <= 6


def test_without_trl_it_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "from driftscope.cli import main\n"
        f"raise SystemExit(main(['doctor', '--config', {yaml(tmp_path, top_p=0.8)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2, done.stderr
    assert "not installed" in done.stderr
    assert "Traceback" not in done.stderr
