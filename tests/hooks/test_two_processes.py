"""Two processes with gloo on the CPU: the run goes on, whatever happens to the probe of one rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.runs import steps_of

ROOT = Path(__file__).resolve().parents[2]


def launch(tmp_path: Path, fail_on: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.hooks.two_processes", str(tmp_path), str(fail_on)]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("fail_on", [-1, 1])
def test_the_run_goes_on(tmp_path: Any, fail_on: int) -> None:
    launch(tmp_path, fail_on)
    records = steps_of(tmp_path / "run")
    assert [(r.step, r.micro_step, r.rank) for r in records] == [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0)]
    for record in records:
        assert record.residual < 1e-5
        assert record.paths["reference"].coef_error < 1e-5
        assert "several processes" in record.unavailable["param_norm"]
        assert "processes" in record.paths["liger"].note
