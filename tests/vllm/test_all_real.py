"""The seed's own TRL and Liger-Kernel with a real engine, by the one command of the README."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from driftscope.journal import read_run
from driftscope.verdict import judge
from tests.vllm.engine_runs import needs_vllm, quiet_upstream

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / ".venv" / "pairs" / "trl-0.27.2-liger_kernel-0.6.5"
pytestmark = [
    needs_vllm,
    quiet_upstream,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PAIR.is_dir(), reason="needs TRL 0.27.2 and Liger-Kernel 0.6.5: make setup-vllm"),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: Any) -> Path:
    """The four cells, trained once."""
    directory: Path = tmp_path_factory.mktemp("all-real")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PAIR), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "examples/real_vllm.py", "--out", str(directory)],
        capture_output=True, text=True, cwd=ROOT, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "grad_norm with Liger" in done.stdout
    return directory


def rows(out: Path, live: str, top_p: float) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((out / f"{live}-{top_p}" / "log.json").read_text(encoding="utf-8"))
    return found


def test_honest_sampling_leaves_no_gap(out: Path):
    for liger, reference in zip(rows(out, "liger", 1.0), rows(out, "reference", 1.0), strict=True):
        assert reference["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert liger["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.1)


def test_truncated_sampling_makes_both_gaps(out: Path):
    gaps = []
    for liger, reference in zip(rows(out, "liger", 0.8), rows(out, "reference", 0.8), strict=True):
        assert reference["ratio"] < 0.1  # completions that end early keep more of it
        assert liger["grad_norm"] > 1.0
        gaps.append(liger["grad_norm"] / reference["grad_norm"])
    assert min(gaps) > 5, gaps
    assert statistics.median(gaps) > 50, gaps


def test_the_report_tells_both_causes_and_what_to_change_first(out: Path):
    run = read_run(out / "liger-0.8")
    verdict = judge(run)
    assert run.info is not None
    assert run.info.versions["trl"] == "0.27.2"
    assert verdict.level == "critical"
    rules = {a.rule for a in run.alerts if a.severity == "critical"}
    assert {"DS101", "DS102", "DS201"} <= rules
    assert "top_p" in verdict.first_action
    html = (out / "liger-0.8" / "report.html").read_text(encoding="utf-8")
    for words in ("importance sampling correction", "truncated", "top_p=1.0"):
        assert words in html
    quiet = judge(read_run(out / "reference-1.0"))
    assert quiet.level in ("ok", "info")


def test_the_causes_are_those_of_the_stand_in_engine(out: Path):
    for record in read_run(out / "liger-0.8").steps:
        if record.canary is None:
            continue
        assert record.is_ratio is not None
        assert record.is_ratio.causes[0].id == "truncated_support"
        assert record.is_ratio.causes[0].share == pytest.approx(1.0, abs=0.01)
        assert record.canary.agrees_with == "current"
