from __future__ import annotations

import math

import pytest

from driftscope.dashboards.series import Line, by_step, middle, pair, thin, thin_together, why_unavailable
from driftscope.records import Gap, StepRecord


def record(step, residual=None, **fields):
    return StepRecord(step=step, micro_step=0, live="liger", residual=residual, **fields)


def test_micro_batches_of_a_step_become_median_and_band():
    line = by_step([record(2, 5.0), record(1, 1.0), record(2, 1.0), record(2, 9.0)], lambda s: s.residual)
    assert (line.x, line.mid, line.low, line.high) == ([1, 2], [1.0, 5.0], [1.0, 1.0], [1.0, 9.0])


def test_a_missing_value_is_a_hole_and_a_light_step_is_not():
    steps = [record(1, 1.0), record(2, None, tier="light"), record(3, None), record(4, math.nan), record(5, 2.0)]
    line = by_step(steps, lambda s: s.residual)
    assert line.x == [1, 3, 4, 5]
    assert line.mid == [1.0, None, None, 2.0]


def test_log_counts_what_it_cannot_show():
    line = by_step([record(1, 0.0), record(2, -1.0), record(3, 2.0)], lambda s: s.residual, log=True)
    assert line.dropped == 2
    assert line.mid == [None, None, 2.0]


def test_thinning_keeps_extremes_holes_and_both_ends():
    n = 20_000
    mid = [1.0 + (i % 7) * 0.01 for i in range(n)]
    low, high = [v - 0.1 for v in mid], [v + 0.1 for v in mid]
    high[12_345], low[777], mid[4_321] = 99.0, -5.0, None
    thinned = thin(Line(x=list(range(n)), mid=mid, low=low, high=high), limit=500)
    assert len(thinned.x) <= 700
    assert max(thinned.high) == 99.0
    assert min(thinned.low) == -5.0
    assert None in thinned.mid
    assert (thinned.x[0], thinned.x[-1]) == (0, n - 1)
    assert thinned.x == sorted(thinned.x)


def test_a_short_line_is_left_alone():
    line = by_step([record(s, float(s)) for s in range(1, 50)], lambda s: s.residual)
    assert thin(line) is line


def test_middle_skips_what_is_not_finite():
    assert middle([record(1, math.inf), record(2, 2.0), record(3)], lambda s: s.residual) == 2.0
    assert middle([record(1)], lambda s: s.residual) is None


def test_pair_comes_from_the_latest_gap():
    assert pair([]) == ("liger", "reference")
    steps = [
        record(1, gap=Gap(candidate="a", reference="b")),
        record(2, gap=Gap(candidate="c", reference="d")),
        record(3),
    ]
    assert pair(steps) == ("c", "d")


@pytest.mark.parametrize(("signal", "why"), [("residual", "old"), ("paths", "no call"), ("path", None)])
def test_reason_by_name_or_prefix(signal, why):
    steps = [record(1, unavailable={"residual": "old"}), record(2, unavailable={"paths.liger": "no call"})]
    assert why_unavailable(steps, signal) == why


def test_lines_thinned_together_keep_the_same_steps_and_the_leads_extremes():
    n = 5_000
    xs = list(map(float, range(n)))
    first, second = [0.5] * n, [1.0] * n
    first[1_234], first[3_000], second[2_345] = 9.0, None, -7.0
    lines = [Line(xs, first, first, first), Line(xs, second, second, second)]
    both = thin_together(lines, 300)
    assert both[0].x == both[1].x
    assert len(both[0].x) <= 330
    assert (max(v for v in both[0].mid if v is not None), min(both[1].mid)) == (9.0, -7.0)
    assert None in both[0].mid
    lead = thin_together(lines, 300, lead=1)
    assert 9.0 in lead[0].mid
    assert -7.0 not in lead[1].mid
    assert thin_together(lines, n) == lines
