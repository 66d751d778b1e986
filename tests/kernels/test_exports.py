"""The kernels' public names load on use."""

from __future__ import annotations

import pytest

import driftscope.kernels as kernels

PUBLIC = [
    "Directions",
    "FusedLoss",
    "fused_linear_grpo",
    "fused_linear_grpo_loss",
    "fused_linear_logprobs",
    "linear_directions",
]


def test_the_public_names_are_these_and_resolve():
    assert kernels.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(kernels))
    assert all(getattr(kernels, name).__name__ == name for name in PUBLIC)
    assert all(getattr(kernels, name).__doc__ for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fused'"):
        _ = kernels.fused
