"""Threshold profiles: each limit crosses and does not, the noise floor only widens, and a user's own are read."""

from __future__ import annotations

import json
import math

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.mismatch import FORMULAS, Mismatch, figures, measure_mismatch
from driftscope.profiles import (
    CHECKS,
    PROFILES,
    STRICT,
    TRL,
    Profile,
    load_profile,
    profile_dict,
    unchecked,
    violations,
)


def mismatch_of(figure, value):
    """A mismatch with one figure in it."""
    *path, last = figure.split(".")
    out = Mismatch(tokens=1000, sequences=10)
    holder = out
    for part in path:
        holder = getattr(holder, part)
    setattr(holder, last, value)
    return out


def figure_of(name):
    return CHECKS[name].figure.replace("{level}", "token")


def named(found):
    return [v.limit for v in found]


LIMITS = [(profile, name) for profile in PROFILES.values() for name in profile.limits]


@pytest.mark.parametrize(("profile", "name"), LIMITS, ids=lambda x: getattr(x, "name", x))
def test_each_limit_fires_beyond_and_not_before(profile, name):
    check, limit = CHECKS[name], profile.limits[name]
    out = 1 if check.side == "high" else -1
    beyond, before = limit * (1 + 0.01 * out), limit * (1 - 0.01 * out)
    (found,) = violations(mismatch_of(figure_of(name), beyond), profile, first_step=True)
    assert (found.limit, found.value, found.allowed, found.nominal) == (name, beyond, limit, limit)
    assert found.source == profile.sources[name]
    assert found.figure in FORMULAS and found.figure in found.text
    assert violations(mismatch_of(figure_of(name), before), profile, first_step=True) == []
    if check.magnitude:
        assert named(violations(mismatch_of(figure_of(name), -beyond), profile, first_step=True)) == [name]


def test_every_limit_is_in_a_profile_and_has_a_source():
    assert set(PROFILES) == {"strict", "verl", "nemo", "trl"}
    assert {name for _, name in LIMITS} == set(CHECKS)
    for profile in PROFILES.values():
        assert set(profile.sources) == set(profile.limits)


@pytest.mark.parametrize("name", list(CHECKS))
def test_a_measured_noise_floor_widens_a_limit_and_never_narrows_it(name):
    check, limit = CHECKS[name], STRICT.limits[name]
    figure = figure_of(name)
    beyond = limit**1.01 if check.log else check.ideal + 1.01 * (limit - check.ideal)
    if check.log:
        low_noise, noise = math.exp(math.log(limit) / 10), math.exp(math.log(limit) / 2)
    else:
        low_noise, noise = (check.ideal + (limit - check.ideal) * part for part in (0.1, 0.5))
    for floor in (low_noise, check.ideal):  # three times a tenth of the distance: still the profile's own limit
        (found,) = violations(mismatch_of(figure, beyond), STRICT, mismatch_of(figure, floor), first_step=True)
        assert found.allowed == limit
    assert violations(mismatch_of(figure, beyond), STRICT, mismatch_of(figure, noise), first_step=True) == []
    if name != "ess_low":  # 1.5 times the distance: an effective sample size has room for it too, see below
        far = limit**2 if check.log else check.ideal + 2 * (limit - check.ideal)
        (found,) = violations(mismatch_of(figure, far), STRICT, mismatch_of(figure, noise), first_step=True)
        assert (found.nominal, found.allowed) == (limit, pytest.approx(limit**1.5 if check.log else 1.5 * limit))
        assert "noise floor" in found.text


def test_a_floor_that_leaves_no_room_switches_the_limit_off():
    lost, floor = mismatch_of("raw.token.ess", 0.001), mismatch_of("raw.token.ess", 0.6)
    assert named(violations(lost, STRICT)) == ["ess_low"]
    assert violations(lost, STRICT, floor) == []


def test_the_multiple_is_the_profiles():
    noisy, floor = mismatch_of("divergence.k3", 0.005), mismatch_of("divergence.k3", 0.002)
    assert violations(noisy, Profile(k3_high=1e-3), floor) == []
    assert named(violations(noisy, Profile(k3_high=1e-3, noise_multiple=2.0), floor)) == ["k3_high"]
    assert named(violations(noisy, Profile(k3_high=1e-3, noise_multiple=0.0), floor)) == ["k3_high"]


def honest(sigma, seed, B=16, T=200, bias=0.0):
    g = torch.Generator().manual_seed(seed)
    engine = -torch.rand(B, T, generator=g, dtype=torch.float64) * 5
    trainer = engine + bias + sigma * torch.randn(B, T, generator=g, dtype=torch.float64)
    return figures(measure_mismatch(trainer, engine, torch.ones(B, T), applied=torch.ones(B, 1)))


@pytest.mark.parametrize("level", ["token", "geometric", "applied"])
@pytest.mark.parametrize("sigma", [1e-6, 0.03, 0.1, 0.3])
def test_noise_alone_crosses_nothing_whatever_its_size(sigma, level):
    """The widest profile there is: every limit at the ideal, so that only the floor holds."""
    tight = {name: check.ideal for name, check in CHECKS.items()}
    profile = Profile(level=level, **tight)
    for seed in range(8):
        for floor in (sigma, honest(sigma, 100 + seed)):
            found = violations(honest(sigma, seed), profile, floor, first_step=True)
            assert found == [], (seed, [v.text for v in found])


@pytest.mark.parametrize("floor", [1e-3, None])
def test_a_bias_far_over_the_noise_still_fires(floor):
    biased = honest(1e-3, 0, bias=math.log(0.8))
    found = named(violations(biased, STRICT, floor, first_step=True))
    assert {"ratio_mean_low", "kl_high", "mult_prob_error_high", "share_outside_high", "k3_high"} <= set(found)
    assert "first_step_log_diff_high" in found
    assert "first_step_log_diff_high" not in named(violations(biased, STRICT, floor))


def test_the_level_is_the_one_that_the_loss_applies():
    out = honest(0.01, 0, bias=-0.02)
    assert out.applied_level == "sequence"
    (low,) = violations(out, Profile(ratio_mean_low=0.5))
    assert low.figure == "raw.product.mean"
    assert violations(out, Profile(ratio_mean_low=0.5, level="token")) == []


def test_what_is_unavailable_is_said_not_passed():
    empty = Mismatch()
    assert violations(empty, STRICT, first_step=True) == []
    assert unchecked(empty, STRICT, first_step=True) == list(STRICT.limits)
    assert unchecked(honest(0.01, 0), STRICT, first_step=True) == []


def test_a_profile_of_ones_own(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"base": "verl", "name": "mine", "ess_low": 0.5, "kl_high": None}), encoding="utf-8")
    mine = load_profile(file)
    assert (mine.name, mine.ess_low, mine.kl_high, mine.ratio_mean_low) == ("mine", 0.5, None, 0.5)
    assert "ess_low" not in mine.sources and "ratio_mean_low" in mine.sources
    assert load_profile(str(file)) == mine
    assert load_profile(profile_dict(mine)) == mine
    assert load_profile({"k3_high": 0.01}) == Profile(k3_high=0.01)
    for name, profile in PROFILES.items():
        assert load_profile(name) is profile
        assert load_profile(profile_dict(profile)) == profile


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"ess_lo": 0.3}, "Did you mean 'ess_low'"),
        ({"base": "verll"}, "Did you mean 'verl'"),
        ("nemoo", "Did you mean 'nemo'"),
        ({"ess_low": 1.2}, "between 0 and 1"),
        ({"ess_low": "0.3"}, "ess_low='0.3'"),
        ({"kl_high": -0.1}, "at least 0"),
        ({"ratio_mean_low": 0.0}, "ratio_mean_low=0.0"),
        ({"ratio_mean_high": 0.9}, "at least 1"),
        ({"k3_high": math.nan}, "k3_high=nan"),
        ({"k3_high": True}, "k3_high=True"),
        ({"level": "sequence"}, "applied, token, geometric, product"),
        ({"noise_multiple": -1}, "noise_multiple=-1"),
        ({"sources": {"ess_loww": "me"}}, "Did you mean 'ess_low'"),
        ({"sources": "me"}, "sources='me'"),
        ({"name": 3}, "name=3"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_nearest(source, message):
    with pytest.raises(UsageError, match=message):
        load_profile(source)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    for text in ("{", "[]", "\x00"):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=r"bad\.json"):
            load_profile(tmp_path / "bad.json")
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UsageError, match=r"latin\.json"):
        load_profile(tmp_path / "latin.json")
    with pytest.raises(UsageError, match=r"missing\.json"):
        load_profile(tmp_path / "missing.json")


@pytest.mark.parametrize("floor", [-1.0, math.nan, math.inf])
def test_a_noise_floor_is_a_standard_deviation(floor):
    with pytest.raises(UsageError, match="noise_floor"):
        violations(Mismatch(), TRL, floor)
