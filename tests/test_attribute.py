"""Attribution on batches whose missing terms are known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from driftscope.attribute import PathCoefs, Scene, attribute, identify, possible_changes
from driftscope.batch import TokenBatch
from driftscope.explanation import shapley
from driftscope.spec import LossSpec
from driftscope.spectrum import HeadView, Spectrum

B, T = 4, 9

FULL = LossSpec(
    loss_type="dapo",
    beta=0.1,
    kl_bias_correction=True,
    is_correction=True,
    is_mode="token_truncate",
    tool_mask=True,
    delta=1.3,
    accumulation_steps=2,
    max_completion_length=16,
)


def scene(seed: int = 0) -> Scene:
    g = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(B, T, generator=g, dtype=torch.float64) * scale

    mask = torch.ones(B, T)
    mask[0, 5:] = 0
    mask[2, 7:] = 0
    tools = torch.ones(B, T)
    tools[1, 2:5] = 0
    logps = -2 + draw(0.3)
    batch = TokenBatch(
        logps_BT=logps,
        old_logps_BT=logps + draw(0.3),
        ref_logps_BT=logps + draw(0.3),
        sampling_logps_BT=logps + draw(0.2) + 1.0,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.7], dtype=torch.float64),
        completion_mask_BT=mask,
        tool_mask_BT=tools,
        num_items_in_batch=50.0,
    )
    rows = mask.bool()
    n = int(rows.sum())
    uu = torch.rand(n, generator=g, dtype=torch.float64) + 0.5
    zero = torch.zeros(n, dtype=torch.float64)
    view = HeadView(logps[rows], zero, uu, zero)
    raw = HeadView(logps[rows] - 0.1, zero, uu * 4, zero)
    spectrum = Spectrum({"model": view, "raw": raw}, zero, {("model", "raw"): uu * 1.8})
    return Scene({"model": batch, "raw": batch}, spectrum, rows)


DROPS = {
    "is_correction": {"is_correction": False},
    "tool_mask": {"tool_mask": False},
    "kl_bias_correction": {"kl_bias_correction": False},
    "delta_clamp": {"delta": None},
    "normalizer": {"normalizer": "micro_batch"},
}


@pytest.mark.parametrize(
    "dropped", [c for k in range(len(DROPS) + 1) for c in itertools.combinations(DROPS, k)], ids="+".join
)
def test_every_combination_is_identified(dropped):
    s = scene()
    changes = {name: value for cause in dropped for name, value in DROPS[cause].items()}
    path = s.path(FULL.replace(**changes), "model")
    found = identify(s, FULL, "model", path, tolerance=1e-9)
    assert {c.cause for c in found.changes} == set(dropped)
    assert found.error < 1e-9
    causes, rest = attribute(s, FULL, "model", path, found, tolerance=1e-9).causes()
    assert {c.id for c in causes} == set(dropped)
    assert rest.share == 0.0
    gap = s.norm(path) / s.norm(s.path(FULL, "model"))
    assert math.prod(c.factor for c in causes) == pytest.approx(gap, rel=1e-9)
    if causes:
        assert sum(c.share for c in causes) == pytest.approx(1.0)
        assert [c.share for c in causes] == sorted((c.share for c in causes), reverse=True)


def test_one_dropped_term_has_the_whole_gap_as_its_factor():
    s = scene()
    path = s.path(FULL.replace(is_correction=False), "model")
    causes, _ = attribute(
        s, FULL, "model", path, identify(s, FULL, "model", path, tolerance=1e-9), tolerance=1e-9
    ).causes()
    assert causes[0].factor == pytest.approx(s.norm(path) / s.norm(s.path(FULL, "model")), rel=1e-12)
    assert causes[0].share == 1.0


def test_another_head_is_a_cause():
    s = scene()
    path = s.path(FULL.replace(tool_mask=False), "raw")
    found = identify(s, FULL, "model", path, tolerance=1e-9, head_cause="head_adapter")
    causes, rest = attribute(s, FULL, "model", path, found, tolerance=1e-9).causes()
    assert {c.id for c in causes} == {"head_adapter", "tool_mask"}
    assert causes[0].id == "head_adapter"
    assert causes[0].factor == pytest.approx(2.0, rel=0.05)
    assert rest.share == 0.0


def test_what_no_term_explains_is_kept_apart():
    s = scene()
    honest = s.path(FULL, "model")
    odd = PathCoefs("model", honest.c_N * 3.0)
    found = identify(s, FULL, "model", odd, tolerance=1e-6)
    causes, rest = attribute(s, FULL, "model", odd, found, tolerance=1e-6).causes()
    assert rest.share > 0.5
    assert rest.factor is not None
    assert math.prod([rest.factor, *(c.factor for c in causes)]) == pytest.approx(3.0, rel=1e-9)


def test_a_matching_path_has_no_cause():
    s = scene()
    path = s.path(FULL, "model")
    causes, rest = attribute(
        s, FULL, "model", path, identify(s, FULL, "model", path, tolerance=1e-6), tolerance=1e-6
    ).causes()
    assert causes == []
    assert rest.share == 0.0
    assert rest.factor == pytest.approx(1.0)


def test_terms_that_are_off_are_no_candidates():
    plain = LossSpec(loss_type="grpo")
    assert possible_changes(plain) == []
    assert {g[0].cause for g in possible_changes(FULL)} == set(DROPS)


def test_zero_paths():
    s = scene()
    zero = PathCoefs("model", torch.zeros_like(s.path(FULL, "model").c_N))
    assert s.cosine(zero, zero) is None
    assert s.distance(zero, zero) == 0.0
    assert s.distance(s.path(FULL, "model"), zero) == math.inf
    found = identify(s, FULL, "model", zero, tolerance=1e-6)
    causes, rest = attribute(s, FULL, "model", zero, found, tolerance=1e-6).causes()
    assert all(math.isfinite(c.share) for c in causes)
    assert math.isfinite(rest.share)


def test_shapley_is_efficient_and_symmetric():
    def value(coalition):
        return float(len(coalition) ** 2 + ("a" in coalition))

    out = shapley(["a", "b", "c"], value)
    assert sum(out.values()) == pytest.approx(value({"a", "b", "c"}) - value(set()))
    assert out["b"] == pytest.approx(out["c"])
    assert out["a"] == pytest.approx(out["b"] + 1)
