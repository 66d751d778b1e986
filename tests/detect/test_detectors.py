"""Each detector fires on its own fault, not on the others' and not on honest noise."""

from __future__ import annotations

import json
import math

import pytest

from driftscope.detect import (
    BaselineSettings,
    BiasDetector,
    BiasSettings,
    ShiftDetector,
    ShiftSettings,
    SpikeDetector,
    SpikeSettings,
    TrendDetector,
    TrendSettings,
)
from driftscope.errors import UsageError
from tests.detect.series import LOG3, LOG100, alarms, one, plus, pulse, ramp, step

DETECTORS = [SpikeDetector, ShiftDetector, TrendDetector, BiasDetector]
NOISES = ["white", "ar1_0.5", "ar1_0.8"]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("detector", DETECTORS)
def test_honest_noise_is_no_fault(detector, noise):
    assert alarms(detector(), one(noise, seed=3, steps=1500)) == []


@pytest.mark.parametrize("noise", NOISES)
def test_spike_fires_at_the_spike_and_once(noise):
    (alarm,) = alarms(SpikeDetector(), plus(one(noise), pulse(LOG100, 300)))
    assert (alarm.kind, alarm.step, alarm.started) == ("spike", 301, 301)
    assert alarm.score > alarm.threshold
    assert alarm.deviation == pytest.approx(LOG100, abs=1.5)


def test_spike_does_not_fire_on_a_ramp_or_a_bias():
    assert alarms(SpikeDetector(), plus(one(), ramp(LOG3, 200, 300))) == []
    assert alarms(SpikeDetector(), [v + 5 for v in one()]) == []


def test_spike_takes_a_place_where_values_stay_as_the_new_level():
    told = alarms(SpikeDetector(), plus(plus(one(), step(LOG100, 200)), pulse(LOG100, 400)))
    assert [alarm.step for alarm in told] == [201, 401]


def test_spike_cooldown_and_hysteresis():
    twice = plus(plus(one(), pulse(LOG100, 300)), pulse(LOG100, 305))
    assert len(alarms(SpikeDetector(SpikeSettings(cooldown=20)), twice)) == 1
    assert len(alarms(SpikeDetector(SpikeSettings(cooldown=0)), twice)) == 2
    wide = plus(one(), pulse(LOG100, 300, width=4))
    assert len(alarms(SpikeDetector(SpikeSettings(cooldown=0)), wide)) == 1  # not armed again before it is back


def test_heavy_tails_raise_the_spike_threshold():
    light, heavy = SpikeDetector(), SpikeDetector()
    alarms(light, one())
    alarms(heavy, one("student_t3"))
    assert heavy.threshold > 2 * light.threshold


@pytest.mark.parametrize("noise", NOISES)
def test_shift_fires_once_and_says_when_it_began(noise):
    told = alarms(ShiftDetector(), plus(one(noise, sd=0.1), step(LOG3, 300)))
    (alarm,) = told
    assert alarm.kind == "shift"
    assert 301 <= alarm.step <= 311
    assert abs(alarm.started - 301) <= 1
    assert alarm.deviation == pytest.approx(LOG3, abs=0.3)


def test_shift_does_not_fire_on_spikes():
    series = plus(plus(one(), pulse(LOG100, 200)), pulse(LOG100, 300, width=2))
    assert alarms(ShiftDetector(), series) == []


def test_a_return_home_is_no_shift_but_another_level_is():
    back = plus(one(sd=0.1), pulse(LOG3, 200, width=60))
    assert len(alarms(ShiftDetector(), back)) == 1
    further = plus(plus(one(sd=0.1), step(LOG3, 200)), step(LOG3, 260))
    up, more = alarms(ShiftDetector(), further)
    assert more.deviation == pytest.approx(2 * LOG3, abs=0.2)
    assert more.baseline == pytest.approx(up.baseline, abs=1e-12)  # counted from home
    down = plus(plus(one(sd=0.1), step(LOG3, 200)), step(-2 * LOG3, 260))
    assert [a.deviation > 0 for a in alarms(ShiftDetector(), down)] == [True, False]


def test_a_fast_ramp_is_called_a_trend_by_the_shift_detector():
    told = alarms(ShiftDetector(), plus(one(sd=0.05), ramp(3 * LOG100, 300, 300)))
    assert "trend" in {alarm.kind for alarm in told}


@pytest.mark.parametrize(("noise", "within"), [("white", 200), ("ar1_0.5", 300)])
def test_trend_fires_on_a_slow_ramp(noise, within):
    told = alarms(TrendDetector(), plus(one(noise), ramp(LOG3, 200, 300)))
    assert [alarm.kind for alarm in told] == ["trend"]
    assert 200 < told[0].step <= 200 + within
    assert told[0].deviation > 0.5


@pytest.mark.parametrize("fault", [step(LOG3, 300), pulse(LOG100, 300), step(LOG3, 307), step(0.4, 250)])
@pytest.mark.parametrize("seed", range(5))
def test_trend_does_not_fire_on_a_step_or_a_spike(fault, seed):
    assert alarms(TrendDetector(), plus(one(seed=seed), fault)) == []


def test_trend_is_told_again_only_after_it_was_over():
    long = plus(one(steps=1500, sd=0.1), ramp(6 * LOG3, 200, 1300, steps=1500))
    assert len(alarms(TrendDetector(), long)) == 1
    pause = plus(one(steps=1800, sd=0.1), plus(ramp(LOG3, 200, 300, 1800), ramp(LOG3, 1200, 300, 1800)))
    assert len(alarms(TrendDetector(), pause)) == 2


def test_bias_fires_on_a_mean_that_the_other_detectors_take_for_normal():
    biased = [v + 0.01 for v in one(sd=0.02)]
    (alarm,) = alarms(BiasDetector(), biased)
    assert alarm.kind == "bias"
    assert alarm.baseline == 0.0
    assert alarm.value == pytest.approx(0.01, abs=0.004)
    for other in (SpikeDetector, ShiftDetector, TrendDetector):
        assert alarms(other(), biased) == []


def test_bias_has_a_target_and_a_floor():
    biased = [v + 0.05 for v in one(sd=0.02)]
    assert len(alarms(BiasDetector(), biased)) == 1
    assert alarms(BiasDetector(BiasSettings(target=0.05)), biased) == []
    assert alarms(BiasDetector(floor=0.1), biased) == []


def test_bias_arms_again_after_it_was_over():
    series = [v + (0.03 if i < 300 or i >= 2400 else 0.0) for i, v in enumerate(one(sd=0.02, steps=3000))]
    first, second = alarms(BiasDetector(), series)
    assert first.step < 300
    assert second.step > 2400


@pytest.mark.parametrize("detector", DETECTORS)
def test_nothing_fires_in_the_warm_up(detector):
    series = plus(one(steps=60), step(LOG100, 20, 60))
    told = alarms(detector(baseline=BaselineSettings(warmup=60)), series)
    assert all(alarm.step >= 60 for alarm in told)


@pytest.mark.parametrize("detector", DETECTORS)
def test_nothing_fires_below_the_floor(detector):
    series = plus(one(sd=0.001), step(0.02, 300))
    series = plus(series, ramp(0.02, 300, 200))
    assert alarms(detector(), series)
    assert alarms(detector(floor=0.05), series) == []


def test_a_shift_far_over_a_floor_far_over_the_noise_is_found():
    series = plus(one(sd=0.001), step(LOG3, 300))
    assert [a.step for a in alarms(ShiftDetector(floor=0.05), series)] == [303]
    assert [a.step for a in alarms(SpikeDetector(floor=0.05), series)] == [301]


@pytest.mark.parametrize("detector", DETECTORS)
def test_missing_values_are_left_out(detector):
    fault = plus(plus(one(sd=0.1), ramp(LOG3, 300, 200)), pulse(LOG100, 280))
    holes = [None if i % 5 == 1 else math.nan if i % 7 == 3 else v for i, v in enumerate(fault)]
    assert alarms(detector(), holes) or detector is BiasDetector
    honest = [None if i % 5 == 1 else v for i, v in enumerate(one("ar1_0.5", steps=1500))]
    assert alarms(detector(), honest) == []
    assert alarms(detector(), [None] * 500) == []


@pytest.mark.parametrize("detector", DETECTORS)
def test_constants_are_no_fault_and_a_change_from_them_is(detector):
    assert alarms(detector(), [0.0] * 600) == []
    if detector in (SpikeDetector, ShiftDetector):
        assert len(alarms(detector(floor=1e-3), [0.0] * 300 + [0.1] * 300)) == 1
        assert alarms(detector(floor=1e-3), [0.0] * 300 + [1e-4] * 300) == []


@pytest.mark.parametrize("detector", DETECTORS)
def test_huge_and_infinite_values_do_not_poison_the_baseline(detector):
    made, clean = detector(), detector()
    series = one(sd=0.1)
    bad = {100: math.inf, 150: -math.inf, 200: 1e300, 250: -1e12}
    for i, value in enumerate(series):
        made.update(i, bad.get(i, value))
        clean.update(i, value)
    assert abs(made.baseline.level - clean.baseline.level) < 0.02
    assert made.baseline.scale == pytest.approx(clean.baseline.scale, rel=0.15)
    json.dumps(made.state(), allow_nan=False)


@pytest.mark.parametrize("cut", [10, 49, 50, 137, 301, 305, 420])
@pytest.mark.parametrize("detector", DETECTORS)
def test_a_resumed_detector_goes_on_as_if_nothing_had_been(detector, cut):
    series = plus(plus(plus(one("ar1_0.5"), step(LOG3, 300)), pulse(LOG100, 150)), ramp(LOG3, 350, 200))
    series[400] = math.nan
    whole = detector(floor=0.01)
    expected = alarms(whole, series)
    first = detector(floor=0.01)
    told = alarms(first, series[:cut])
    second = detector.from_state(json.loads(json.dumps(first.state())))
    told += alarms(second, series[max(cut - 5, 0) :], first=max(cut - 5, 0) + 1)  # some steps are repeated: ignored
    assert told == expected
    assert second.state() == whole.state()


def test_memory_is_bounded():
    for detector in (d() for d in DETECTORS):
        for i, value in enumerate(one(steps=3000)):
            detector.update(i, value if i > 900 or i % 10 == 0 else None)
        assert len(json.dumps(detector.state())) < 20_000


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("state", [{}, [], None, {"last_step": 3}, "x"])
def test_a_foreign_state_is_refused(detector, state):
    with pytest.raises(UsageError, match="saved state"):
        detector.from_state(state)


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_damaged_state_is_refused(detector):
    state = detector().state()
    for damaged in (
        {**state, "settings": {}},
        {**state, "baseline": {}},
        {**state, "baseline": {**state["baseline"], "level": "high"}},
        {**state, "floor": -1},
    ):
        with pytest.raises(UsageError):
            detector.from_state(damaged)


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        (SpikeSettings, "threshold", 0.0),
        (SpikeSettings, "cooldown", -1),
        (SpikeSettings, "stay", 2.5),
        (ShiftSettings, "threshold", math.nan),
        (ShiftSettings, "least", 1),
        (ShiftSettings, "window", 3),
        (TrendSettings, "block", 1),
        (TrendSettings, "release", -0.1),
        (BiasSettings, "alpha", 0.0),
        (BiasSettings, "alpha", 1.0),
        (BiasSettings, "target", math.inf),
        (BaselineSettings, "warmup", 5),
        (BaselineSettings, "max_phi", 1.0),
        (BaselineSettings, "clip", "wide"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, field, value):
    with pytest.raises(UsageError, match=field):
        settings(**{field: value})


@pytest.mark.parametrize("floor", [-1.0, math.nan, math.inf, None, True])
def test_a_floor_out_of_range_is_refused(floor):
    with pytest.raises(UsageError, match="floor"):
        SpikeDetector(floor=floor)
