"""The log ratio taken apart: the parts that are there are chosen, the others are not, and nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch

from driftscope.decompose import Part, decompose

N = 256


def noise(seed: int, size: float) -> torch.Tensor:
    return size * torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KEPT = torch.full((N,), math.log(0.8), dtype=torch.float64)


def shares(found) -> dict[str, float]:
    return {c.id: c.share for c in found.causes}


def test_two_parts_and_noise_sum_to_the_whole():
    stale, rest = noise(1, 0.1), noise(2, 0.01)
    parts = [Part("truncated_support", KEPT), Part("stale_weights", stale), Part("temperature", noise(3, 0.2))]
    found = decompose(KEPT + stale + rest, parts, 1e-6)
    assert [c.id for c in found.causes] == ["truncated_support", "stale_weights", "engine_noise"]
    assert sum(shares(found).values()) == pytest.approx(1.0, abs=1e-12)
    assert torch.allclose(found.rest_N, rest)
    assert found.rest_rms == pytest.approx(float(rest.square().mean().sqrt()))
    assert found.causes[0].factor == pytest.approx(0.8)
    total = KEPT + stale + rest
    assert shares(found)["stale_weights"] == pytest.approx(float(stale @ total / (total @ total)))


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_names_no_cause(seed: int):
    candidates = [Part(f"block{i}", noise(1000 + 31 * seed + i, 0.02)) for i in range(30)]
    found = decompose(noise(seed, 0.02), candidates, 1e-6)
    assert [c.id for c in found.causes] == ["engine_noise"]
    assert found.causes[0].share == 1.0


def test_rounding_is_not_looked_into():
    tiny = noise(1, 1e-6)
    assert decompose(tiny, [Part("stale_weights", tiny)], 1e-6).first == "engine_noise"
    assert decompose(tiny, [Part("stale_weights", tiny)], 1e-8).first == "stale_weights"


def test_of_two_that_explain_everything_the_first_is_named():
    shift = noise(1, 0.1)
    almost = shift + noise(2, 1e-7)
    rivals = frozenset({"a", "b"})
    for first, second in (("a", "b"), ("b", "a")):
        parts = [Part(first, almost, rivals=rivals), Part(second, shift, rivals=rivals)]
        found = decompose(shift, parts, 1e-6)
        assert found.first == first
        assert second not in shares(found)


def test_a_chosen_part_excludes_its_rivals():
    whole, part = noise(1, 0.1), noise(2, 0.05)
    parts = [Part("stale_weights", whole, rivals=frozenset({"stale_module"})), Part("stale_module", part)]
    assert set(shares(decompose(whole + part, parts, 1e-6))) == {"stale_weights", "engine_noise"}


def test_nothing_and_nonsense():
    empty = decompose(torch.zeros(0), [], 1e-6)
    assert empty.first == "engine_noise"
    assert empty.rms == 0.0
    same = decompose(torch.zeros(N), [Part("stale_weights", noise(1, 0.1))], 0.0)
    assert shares(same) == {"engine_noise": 1.0}
    broken = Part("temperature", torch.full((N,), math.nan))
    assert decompose(noise(1, 0.1), [broken], 1e-6).first == "engine_noise"
