"""Sharded trainers in two processes: the head is measured whole, the run stays as it is, refusals say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import HAS_DEEPSPEED, NO_DEEPSPEED, Mode, Result, launch
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of

RESIDUAL = 1e-5  # float32; about 3e-7 is seen
ROUNDING = 2e-4  # of weights after two steps of Adam at 1e-3, whose first steps turn rounding into steps
DROPOUT = {"attention_dropout": 0.2}
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason=NO_DEEPSPEED)
MODES = ["ddp", "fsdp2", *(pytest.param(m, marks=needs_deepspeed) for m in ("zero2", "zero3"))]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def measured(result: Result, *, steps: int = 2) -> None:
    """Every micro-batch was measured on every rank, nothing failed, and the model's head was put back."""
    assert [rank["off"] for rank in result.ranks] == [{}] * len(result.ranks)
    assert all(rank["restored"] and rank["steps"] == steps for rank in result.ranks)
    assert [(r.step, r.micro_step) for r in result.records] == [(s + 1, m) for s in range(steps) for m in range(2)]
    for record in result.records:
        assert "head" not in record.unavailable
        assert record.residual < RESIDUAL
        assert record.paths["reference"].coef_error < RESIDUAL


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a weight; biases of keys, which no loss depends on, left out."""
    names = [name for name in one if not name.endswith("k_proj.bias")]
    assert one.keys() == two.keys()
    return max(float((one[n] - two[n]).norm() / one[n].norm().clamp(min=1e-3)) for n in names)


@pytest.mark.parametrize("mode", MODES)
def test_bit_identical_and_measured_without_collectives(tmp_path: Path, mode: Mode) -> None:
    """Dropout on, an importance sampling ratio in force, every stage of a deep step on every micro-batch."""
    job = {"model": DROPOUT, "log_ratio": 0.5}
    bare = launch(tmp_path / "bare", mode, attached=False, **job)
    watched = launch(tmp_path / "watched", mode, forbid=True, settings={"deep_every": 1}, **job)
    assert [rank["sharding"] for rank in watched.ranks] == [mode] * 2
    measured(watched)
    assert bare.weights.keys() == watched.weights.keys()
    for name, value in bare.weights.items():
        assert torch.equal(value, watched.weights[name]), name
    assert [rank["rng"] for rank in bare.ranks] == [rank["rng"] for rank in watched.ranks]
    for record in watched.records:
        assert record.paths["corrected"].coef_error < RESIDUAL


def test_dropout_is_on(tmp_path: Path) -> None:
    """The comparison above means something: with other dropout the weights differ."""
    some = launch(tmp_path / "some", "fsdp2", attached=False, model=DROPOUT)
    none = launch(tmp_path / "none", "fsdp2", attached=False)
    assert distance(some.weights, none.weights) > ROUNDING


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied, shards of unequal size": ({"model": {"tie_word_embeddings": True, "vocab": 511}}, {}),
    "softcap": ({"arch": "gemma2"}, {"softcap": 3.0, "joined": True}),
    "adapter on the head": ({"lora": ["lm_head", "q_proj"]}, {"adapter": True, "joined": False}),
    "bias of its own": ({"head_bias": True}, {"joined": True}),
}


NO_ADAPTER = pytest.mark.skipif(not HAS_LIGER_LOSS, reason="TRL with a fused head refuses an adapter on lm_head")


@pytest.mark.parametrize("head", [pytest.param(h, marks=NO_ADAPTER if "adapter" in h else ()) for h in HEADS])
@pytest.mark.parametrize("mode", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_heads(tmp_path: Path, mode: Mode, head: str) -> None:
    job, expected = HEADS[head]
    result = launch(tmp_path, mode, forbid=True, settings={"deep_every": 1}, **job)
    measured(result)
    for record in result.records:
        assert {name: record.head[name] for name in expected} == expected


def test_a_head_in_a_unit_of_its_own(tmp_path: Path) -> None:
    measured(launch(tmp_path, "fsdp2", forbid=True, wrap=["Qwen2DecoderLayer", "Linear"]))


def test_fsdp1_says_why_the_head_is_not_measured(tmp_path: Path) -> None:
    result = launch(tmp_path, "fsdp1", forbid=True, settings={"deep_every": 1})
    assert [rank["sharding"] for rank in result.ranks] == ["fsdp1"] * 2
    assert [rank["steps"] for rank in result.ranks] == [2, 2]
    assert all("fsdp_version: 2" in record.unavailable["head"] for record in result.records)
    assert not [a for a in alerts_of(result.run_dir) if a.severity == "critical"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One process on the same global batch, by TRL's own loss."""
    return launch(tmp_path_factory.mktemp("one"), "one", attached=False, log_ratio=0.5)


@pytest.mark.parametrize(
    ("mode", "wrap"),
    [
        ("ddp", None),
        ("fsdp2", None),
        ("fsdp2", ["Qwen2DecoderLayer", "Linear"]),
        pytest.param("zero2", None, marks=needs_deepspeed),
    ],
)
def test_the_correct_mode_trains_as_one_process_does(
    tmp_path: Path, mode: Mode, wrap: list[str] | None, alone: Result
) -> None:
    """Also a head that is an FSDP unit of its own: its gradient is averaged over the ranks."""
    corrected = launch(tmp_path / mode, mode, wrap=wrap, settings={"mode": "correct"}, log_ratio=0.5)
    measured(corrected)
    assert distance(alone.weights, corrected.weights) < ROUNDING


@pytest.mark.parametrize(
    ("mode", "why", "remedy"),
    [
        ("fsdp1", "flat shard", "fsdp_version: 2"),
        pytest.param("zero3", "ZeRO-3", "Use ZeRO-2 or FSDP2", marks=needs_deepspeed),
    ],
)
def test_the_correct_mode_is_refused_where_it_cannot_train(tmp_path: Path, mode: Mode, why: str, remedy: str) -> None:
    with pytest.raises(AssertionError, match="UnsupportedTrainerError: mode='correct'") as refused:
        launch(tmp_path, mode, settings={"mode": "correct"})
    assert why in str(refused.value)
    assert remedy in str(refused.value)


def test_a_process_that_dies_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with 1.*broken on purpose"):
        launch(tmp_path, "ddp", attached=False, fail="trl:GRPOTrainer._compute_loss@1")
