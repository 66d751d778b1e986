"""Ratio statistics and kept mass against direct computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from driftscope.is_ratio import describe_ratio, kept_mass, ratio_stats, sum_kept_mass, truncated_support
from driftscope.spec import LossSpec


def test_stats_match_numpy():
    w = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    out = ratio_stats(w, "token", cap=3.0)
    x = w.numpy()
    assert out.count == 1000
    assert out.mean == pytest.approx(x.mean())
    assert out.std == pytest.approx(x.std())
    assert (out.min, out.max) == (x.min(), x.max())
    assert out.ess == pytest.approx(x.sum() ** 2 / (len(x) * (x**2).sum()))
    assert out.share_capped == pytest.approx((x >= 3).mean())
    assert out.share_masked is None
    for name, q in (("p01", 0.01), ("p50", 0.5), ("p95", 0.95)):
        assert out.quantiles[name] == pytest.approx(np.quantile(x, q))


def test_masked_ratios_are_counted():
    out = ratio_stats(torch.tensor([0.0, 0.0, 1.0, 2.0]), "sequence", cap=3.0, masked=True)
    assert out.share_masked == 0.5
    assert out.share_capped is None


@pytest.mark.parametrize("values", [[], [math.nan], [math.nan, math.inf]])
def test_nothing_finite(values):
    out = ratio_stats(torch.tensor(values), "token")
    assert out.count == len(values)
    assert out.mean is None


def test_all_zero_ratios():
    out = ratio_stats(torch.zeros(5), "sequence", masked=True)
    assert out.share_masked == 1.0
    assert out.ess == 0.0


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_raw_and_applied(mode):
    log_ratio = torch.tensor([[0.1, -0.2, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    spec = LossSpec(is_correction=True, is_mode=mode, is_cap=3.0)
    sequence = mode.startswith("sequence")
    applied = torch.tensor([[math.exp(-0.1)], [0.0]]) if sequence else log_ratio.exp().clamp(max=3.0)
    out = describe_ratio(spec, log_ratio, mask, applied)
    assert out.raw_token.count == 4
    assert out.raw.count == (2 if sequence else 4)
    if sequence:
        assert out.raw.max == pytest.approx(math.exp(2.0))
        assert out.applied.share_masked == 0.5
    else:
        assert out.applied.max == pytest.approx(math.e)


def test_kept_mass_of_a_known_distribution():
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)
    log_p = p[:, torch.tensor([2, 0, 3, 1])].log()
    assert kept_mass(log_p, top_p=0.8).item() == pytest.approx(0.9)
    assert kept_mass(log_p, top_p=0.75).item() == pytest.approx(0.75)
    assert kept_mass(log_p, top_p=0.5).item() == pytest.approx(0.5)
    assert kept_mass(log_p, top_k=2).item() == pytest.approx(0.75)
    assert kept_mass(log_p, min_p=0.4).item() == pytest.approx(0.75)
    assert kept_mass(log_p).item() == pytest.approx(1.0)
    # top_k first, then top_p on what is left, renormalised: of 2/3 and 1/3, 0.6 needs the first alone
    assert kept_mass(log_p, top_k=2, top_p=0.6).item() == pytest.approx(0.5)


def test_truncated_support_explains_the_log_ratio():
    kept = torch.full((50,), 0.8, dtype=torch.float64)
    kept[::7] = math.nan
    log_ratio = torch.full((50,), math.log(0.8), dtype=torch.float64)
    spec = LossSpec(is_correction=True, is_mode="token_truncate")
    out = describe_ratio(spec, log_ratio[None], torch.ones(1, 50), None)
    truncated_support(out, sum_kept_mass(log_ratio, kept))
    assert out.kept_mass == pytest.approx(0.8)
    assert out.truncated_support_share == pytest.approx(1.0)
    assert out.causes[0].id == "truncated_support"
    assert out.causes[0].factor == pytest.approx(0.8)


def test_truncated_support_is_silent_without_a_ratio():
    out = describe_ratio(LossSpec(is_correction=True), torch.zeros(1, 4), torch.ones(1, 4), None)
    truncated_support(out, sum_kept_mass(torch.zeros(4), torch.ones(4)))
    assert out.truncated_support_share is None
    assert out.causes == []
