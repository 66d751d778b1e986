"""Monitor: one alarm an episode, whichever detectors see it."""

from __future__ import annotations

import json
import math

import pytest

from driftscope.detect import BaselineSettings, Monitor, MonitorSettings, SpikeSettings
from driftscope.errors import UsageError
from tests.detect.series import LOG3, LOG100, alarms, one, plus, pulse, ramp, step

NOISES = ["white", "ar1_0.5", "ar1_0.8"]


def kinds(told) -> list[tuple[str, bool]]:
    return [(alarm.kind, alarm.upgrade) for alarm in told]


@pytest.mark.parametrize("noise", NOISES)
def test_honest_noise_gives_no_alarm(noise):
    assert alarms(Monitor("log gap"), one(noise, steps=2000, seed=8)) == []


@pytest.mark.parametrize("noise", NOISES)
def test_a_spike_is_told_once(noise):
    (alarm,) = alarms(Monitor("log gap"), plus(one(noise), pulse(LOG100, 300)))
    assert (alarm.kind, alarm.step, alarm.series, alarm.episode, alarm.upgrade) == ("spike", 301, "log gap", 1, False)


@pytest.mark.parametrize("seed", range(8))
def test_two_values_far_out_are_a_spike_too(seed):
    told = alarms(Monitor("x"), plus(one(seed=seed), pulse(LOG100, 300, width=2)))
    assert kinds(told) == [("spike", False)]


def test_a_jump_that_stays_is_first_a_spike_and_then_a_shift_of_the_same_episode():
    told = alarms(Monitor("log gap"), plus(one(sd=0.05), step(LOG100, 300)))
    assert kinds(told) == [("spike", False), ("shift", True)]
    assert {alarm.episode for alarm in told} == {1}
    assert {alarm.started for alarm in told} == {301}
    assert [alarm.step for alarm in told] == [301, 303]


def test_a_small_shift_is_told_once_though_the_bias_and_trend_detectors_see_it_too():
    told = alarms(Monitor("log IS mean"), plus(one(sd=0.02, steps=1500), step(math.log(1.1), 300, 1500)))
    assert {alarm.kind for alarm in told} <= {"spike", "shift"}
    assert sum(not alarm.upgrade for alarm in told) == 1


def test_a_return_is_no_alarm_and_the_next_fault_is_a_new_episode():
    series = plus(one(sd=0.05, steps=900), pulse(LOG3, 300, width=80, steps=900))
    series = plus(series, pulse(LOG3, 700, steps=900))
    told = alarms(Monitor("x"), series)
    assert [(a.kind, a.episode) for a in told] == [("spike", 1), ("shift", 1), ("spike", 2)]


def test_an_open_episode_is_told_again_when_it_grows():
    series = plus(plus(one(sd=0.05), step(math.log(1.5), 300)), step(LOG100, 340))
    told = alarms(Monitor("x"), series)
    assert {a.episode for a in told} == {1}
    assert told[-1].upgrade
    assert told[-1].deviation == pytest.approx(math.log(150), abs=0.2)


@pytest.mark.parametrize("size", [LOG3, 2 * LOG3])
def test_a_slow_ramp_ends_up_as_a_trend(size):
    told = alarms(Monitor("x"), plus(one(steps=800), ramp(size, 200, 400, 800)))
    assert "trend" in {alarm.kind for alarm in told}
    assert len({alarm.episode for alarm in told}) == 1
    assert len(told) <= 4


def test_a_bias_from_the_first_step_is_named_and_does_not_hide_a_shift():
    biased = [v - 0.22 for v in one(sd=0.02)]
    told = alarms(Monitor("x"), plus(biased, step(math.log(1.1), 400)))
    assert told[0].kind == "bias"
    assert told[0].step <= 60
    assert [a.kind for a in told if a.step > 400 and not a.upgrade] in (["shift"], ["spike"])


def test_the_floor_holds_for_every_detector():
    series = plus(one(sd=0.002), plus(step(0.03, 300), pulse(0.04, 200)))
    assert alarms(Monitor("x"), series)
    assert alarms(Monitor("x", floor=0.1), series) == []


def test_detectors_can_be_switched_off():
    settings = MonitorSettings(bias=None, trend=None)
    monitor = Monitor("x", settings=settings)
    assert set(monitor.detectors) == {"spike", "shift"}
    assert alarms(monitor, [v + 0.05 for v in one(sd=0.02)]) == []
    again = Monitor.from_state(monitor.state())
    assert again.settings == settings
    assert alarms(Monitor("x", settings=MonitorSettings(spike=None, shift=None, trend=None, bias=None)), one()) == []


@pytest.mark.parametrize("cut", [20, 50, 301, 303, 345, 500])
def test_a_resumed_monitor_goes_on_as_if_nothing_had_been(cut):
    settings = MonitorSettings(
        spike=SpikeSettings(threshold=5.0), baseline=BaselineSettings(warmup=40), cooldown=30, escalate=1.5
    )
    series: list[float | None] = [*plus(plus(one("ar1_0.5", sd=0.1), step(LOG3, 300)), pulse(LOG100, 340))]
    series[250] = None
    whole = Monitor("x", floor=0.01, settings=settings)
    expected = alarms(whole, series)
    assert len(expected) >= 3
    first = Monitor("x", floor=0.01, settings=settings)
    told = alarms(first, series[:cut])
    second = Monitor.from_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert second.settings == settings
    told += alarms(second, series[cut - 10 :], first=cut - 9)
    assert told == expected
    assert second.state() == whole.state()


@pytest.mark.parametrize("state", [{}, None, 3, {"series": "x"}])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(UsageError, match="saved state"):
        Monitor.from_state(state)
    whole = Monitor("x").state()
    with pytest.raises(UsageError, match="saved state"):
        Monitor.from_state({**whole, "detectors": None})


@pytest.mark.parametrize(("field", "value"), [("cooldown", -1), ("escalate", 0.5)])
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(UsageError, match=field):
        MonitorSettings(**{field: value})
