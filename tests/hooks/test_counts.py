"""What is counted of a batch before anything else, with one copy to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.probe import FINITE_INPUTS, count_tokens
from driftscope.records import StepRecord

HUGE = torch.finfo(torch.float32).max


def batch(**changes: Any) -> dict[str, Any]:
    mask, tools = torch.ones(3, 5, dtype=torch.long), torch.ones(3, 5, dtype=torch.long)
    mask[0, 3:] = 0
    tools[1, 1:3] = 0
    inputs = {
        "completion_mask": mask,
        "tool_mask": tools,
        "advantages": torch.tensor([0.0, 1.0, -1.0]),
        "old_per_token_logps": torch.zeros(3, 5),
        "sampling_per_token_logps": torch.full((3, 5), -0.5, dtype=torch.bfloat16),
        "ref_per_token_logps": None,
    }
    return {**inputs, **changes}


def counted(inputs: dict[str, Any]) -> StepRecord:
    record = StepRecord(step=1, micro_step=0, live="reference")
    count_tokens(inputs, record)
    return record


def test_tokens_and_zero_advantages() -> None:
    record = counted(batch())
    assert (record.tokens, record.completion_tokens) == (11, 13)
    assert record.zero_advantage_share == pytest.approx(1 / 3)
    assert record.nonfinite == []
    plain = {k: v for k, v in batch().items() if k != "tool_mask"}
    assert counted(plain).tokens == 13


@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [float("inf"), -float("inf")]])
@pytest.mark.parametrize("name", FINITE_INPUTS)
def test_every_input_that_is_not_finite_is_named(name: str, values: list[float]) -> None:
    bad = torch.zeros(3) if name == "advantages" else torch.zeros(3, 5)
    bad.view(-1)[: len(values)] = torch.tensor(values)
    assert counted(batch(**{name: bad})).nonfinite == [f"inputs.{name}"]


def test_large_finite_numbers_are_finite() -> None:
    assert counted(batch(old_per_token_logps=torch.full((3, 5), HUGE))).nonfinite == []


def test_one_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, _real=real: reads.append(1) or _real(t, *a))
    counted(batch())
    assert len(reads) == 1
