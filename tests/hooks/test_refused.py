"""Refusals are read from the installed TRL's own source."""

from __future__ import annotations

from typing import Any

import pytest

from driftscope.hooks.refused import refusal, refused_options
from driftscope.spec import LossSpec
from tests.hooks.runs import HAS_LIGER_LOSS, IS_SEED_STACK, trainer


@pytest.mark.skipif(not IS_SEED_STACK, reason="the list below is TRL 0.27's")
def test_options_that_raise(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        found = {row["option"]: row for row in refused_options(made)}
        assert set(found) == {
            "delta",
            "importance_sampling_level",
            "off_policy_mask_threshold",
            "top_entropy_quantile",
            "loss_type='cispo'",
            "loss_type='sapo'",
        }
        assert "sapo" in found["loss_type='sapo'"]["message"]
        assert found["delta"]["where"] == "GRPOConfig.__post_init__"
        assert "two-sided" in found["delta"]["message"]
        assert refusal(made, LossSpec()) is None
        assert "delta" in refusal(made, LossSpec(delta=1.5))
        assert "token" in refusal(made, LossSpec(importance_sampling_level="sequence"))


@pytest.mark.skipif(not IS_SEED_STACK, reason="the constructor's refusals are TRL 0.27's")
@pytest.mark.parametrize(
    "option", [{"delta": 1.5}, {"importance_sampling_level": "sequence"}, {"off_policy_mask_threshold": 0.5}]
)
def test_they_do_raise(tmp_path: Any, option: dict[str, Any]) -> None:
    """What the source says is what happens: the sixth row of the known differences is no silent one."""
    with pytest.raises((ValueError, NotImplementedError), match="Liger"), trainer(tmp_path, liger=True, **option):
        pass


@pytest.mark.skipif(HAS_LIGER_LOSS, reason="for TRL without a Liger loss")
def test_nothing_is_refused_without_a_liger_loss(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        assert refusal(made, LossSpec(delta=1.5, importance_sampling_level="sequence")) is None
