from __future__ import annotations

from driftscope.dashboards.throttle import AlertThrottle
from driftscope.records import AlertRecord


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def alert(step, rule="DS101", severity="warning"):
    return AlertRecord(step=step, rule=rule, severity=severity, title="t", evidence="e", remedy="r")


def shown(throttle, steps, **fields):
    return [(s, d.show) for s in steps if (d := throttle.decide(alert(s, **fields))).show != "hide"]


def test_first_in_full_then_growing_gaps():
    found = shown(AlertThrottle(clock=Clock()), range(1, 3200))
    assert found == [
        (1, "full"),
        (11, "repeat"),
        (111, "repeat"),
        (1111, "repeat"),
        (2111, "repeat"),
        (3111, "repeat"),
    ]


def test_rules_are_limited_apart_from_each_other():
    throttle = AlertThrottle(clock=Clock())
    assert throttle.decide(alert(1, "A")).show == "full"
    assert throttle.decide(alert(1, "B")).show == "full"
    assert throttle.decide(alert(2, "A")).show == "hide"


def test_a_rise_in_severity_is_shown_in_full_and_a_fall_is_not():
    throttle = AlertThrottle(clock=Clock(), max_per_rule=1)
    throttle.decide(alert(1))
    assert throttle.decide(alert(2, severity="critical")).show == "full"
    assert throttle.decide(alert(3, severity="warning")).show == "hide"
    assert throttle.decide(alert(4, severity="critical")).show == "hide"
    assert throttle.rules["DS101"].severity == "critical"


def test_interval_in_seconds_holds_repeats_back():
    clock = Clock()
    throttle = AlertThrottle(min_interval_s=60, clock=clock)
    throttle.decide(alert(1))
    clock.now = 59.0
    assert throttle.decide(alert(500)).show == "hide"
    clock.now = 60.0
    decision = throttle.decide(alert(501))
    assert (decision.show, decision.total, decision.hidden) == ("repeat", 3, 1)


def test_a_rule_falls_silent_after_its_share():
    throttle = AlertThrottle(max_per_rule=3, clock=Clock())
    found = shown(throttle, range(1, 100_000, 10))
    assert len(found) == 3
    assert throttle.rules["DS101"].total == 10_000


def test_the_last_showing_says_so():
    throttle = AlertThrottle(max_per_rule=2, clock=Clock())
    throttle.decide(alert(1))
    assert throttle.decide(alert(20)).last
