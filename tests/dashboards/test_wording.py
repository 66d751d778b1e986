from __future__ import annotations

import math

import pytest

from driftscope.dashboards.wording import clean, count, factor, number, ordered_paths, percent, step_span, utc


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (31.09, "31.1"),
        (0.00312345, "0.00312"),
        (432.0, "432"),
        (416.07, "416"),
        (999.96, "1,000"),
        (12345.6, "12,346"),
        (3e-7, "3×10⁻⁷"),
        (-2.374e-5, "−2.37×10⁻⁵"),
        (1.5e6, "1.5×10⁶"),
        (-0.5, "−0.500"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_factor_and_percent():
    assert factor(107.2) == "107×"
    assert factor(None) == "–"
    assert percent(0.013) == "1.3%"
    assert percent(1.0) == "100%"
    assert percent(0.0002) == "under 0.1%"
    assert percent(math.nan) == "–"


def test_counts_and_spans():
    assert count(1, "step") == "1 step"
    assert count(1200, "micro-batch", "micro-batches") == "1,200 micro-batches"
    assert step_span([3, 3]) == "step 3"
    assert step_span([40, 2, 7]) == "steps 2 to 40"
    assert step_span([]) == ""


def test_clean_disarms_terminal_and_direction_characters():
    assert clean("a\x1b[2Jb\x00c\u202ed\ud800e") == "a\ufffd[2Jb\ufffdc\ufffdd\ufffde"
    assert clean("two\r\nlines\tand a tab") == "two\nlines\tand a tab"


def test_paths_stand_in_their_usual_order():
    assert ordered_paths(["zeta", "oracle", "liger", "alpha"]) == ["liger", "oracle", "alpha", "zeta"]


def test_time_is_utc_and_survives_nonsense():
    assert utc(0.0) == "1970-01-01 00:00:00 UTC"
    assert utc(1e300) == "–"
    assert utc(None) == "–"
