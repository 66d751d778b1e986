"""Two processes with gloo on the CPU, DDP: the rerun disturbs no reducer, and the ranks' sketches are the mean's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def launch(tmp_path: Path, how: str) -> list[dict[str, Any]]:
    """Train in two processes; returns the records."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.hooks.deep_processes", str(tmp_path), how]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    made = tmp_path / f"{how}.json"
    records: list[dict[str, Any]] = json.loads(made.read_text(encoding="utf-8")) if made.exists() else []
    return [r for r in records if r["micro_step"] == 1]


def weights(tmp_path: Path, how: str) -> list[dict[str, torch.Tensor]]:
    return [torch.load(tmp_path / f"{how}-{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    launch(tmp_path, "bare")
    records = launch(tmp_path, "attached")
    for bare, watched in zip(weights(tmp_path, "bare"), weights(tmp_path, "attached"), strict=True):
        assert bare.keys() == watched.keys()
        assert all(torch.equal(value, watched[name]) for name, value in bare.items())
    assert [r["step"] for r in records] == [1, 2, 3]
    for record in records:
        gradient = record["gradient"]
        assert gradient["method"] == "sketch"
        # what DDP has averaged is the mean of the ranks' recomputed gradients
        assert gradient["accumulated"]["value"] < 1e-6
        assert gradient["norms"][record["live"]]["value"] == pytest.approx(record["live_grad_norm"], rel=1e-5)
        assert gradient["norms"][record["live"]]["error"] < 1e-6 * record["live_grad_norm"]
        assert "param_norm" not in record["unavailable"]
    assert records[-1]["gradient"]["bias"]["steps"] == 3


@pytest.mark.slow
def test_a_rank_without_its_part_is_missed(tmp_path: Path) -> None:
    """Its zeros are not taken for a gradient; training goes on."""
    records = launch(tmp_path, "broken")
    assert [r["step"] for r in records] == [1, 2, 3]
    for record in records:
        assert record["gradient"] is None
        assert "on 1 of 2 ranks" in record["unavailable"]["param_norm"]
