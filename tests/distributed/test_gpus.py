"""Two GPUs with NCCL: the findings and the numbers of one, and the same weights with and without Driftscope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import launch
from tests.distributed.test_same_numbers import differences, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
MODES = ["ddp", "fsdp2"]


@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_find_what_one_finds(tmp_path: Path, mode: Any) -> None:
    job = {"device": "cuda", "log_ratio": 0.7, "settings": {"canary_tokens": 0}}
    one = launch(tmp_path / "one", "one", **job)
    two = launch(tmp_path / "two", mode, **job)
    assert [r["off"] for r in (*one.ranks, *two.ranks)] == [{}, {}, {}]
    for a, b in zip(one.records, two.records, strict=True):
        assert differences(plain(a), plain(b)) == []
        assert [row.rank for row in b.ranks.rows] == [0, 1]
        assert b.ranks.disagree == {}
    assert {(a.rule, a.step) for a in one.alerts} == {(a.rule, a.step) for a in two.alerts}


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_bit_identical(tmp_path: Path, mode: Any) -> None:
    job = {"device": "cuda", "steps": 6, "log_ratio": 0.3, "model": {"attention_dropout": 0.2}}
    bare = launch(tmp_path / "bare", mode, attached=False, **job)
    watched = launch(tmp_path / "watched", mode, settings={"deep_every": 3}, **job)
    assert [r["off"] for r in watched.ranks] == [{}, {}]
    assert bare.weights.keys() == watched.weights.keys()
    for name, value in bare.weights.items():
        assert torch.equal(value, watched.weights[name]), name


@pytest.mark.parametrize("place", ["driftscope.hooks.probe:Probe.analyse", "driftscope.hooks.together:pack_blocks"])
def test_a_failure_on_one_gpu_stops_nobody(tmp_path: Path, place: str) -> None:
    done = launch(tmp_path, "ddp", device="cuda", log_ratio=0.3, fail=f"{place}@1")
    assert [r["steps"] for r in done.ranks] == [2, 2]
    assert done.ranks[0]["off"] == {}
    assert done.ranks[1]["off"]
    assert all(record.ranks.missing == [1] for record in done.records)
