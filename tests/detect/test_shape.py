"""Steps and ramps fitted to a short stretch."""

from __future__ import annotations

import pytest

from driftscope.detect.baseline import kept_variance
from driftscope.detect.shape import fit_ramp, fit_step, line


def test_a_step_is_found_where_it_is():
    fit = fit_step([1.0] * 5 + [3.0] * 4)
    assert fit == pytest.approx((0.0, 5, 1.0, 3.0))
    assert fit_ramp([1.0] * 5 + [3.0] * 4).error > 0.5


def test_a_divided_block_is_no_error_of_the_step():
    assert fit_step([1.0] * 5 + [1.7] + [3.0] * 4, skip=1).error == pytest.approx(0.0)


def test_a_ramp_is_found_where_it_begins():
    fit = fit_ramp([2.0] * 6 + [3.0, 4.0, 5.0])
    assert fit == pytest.approx((0.0, 5, 2.0, 5.0))
    assert fit_step([2.0] * 6 + [3.0, 4.0, 5.0]).error > 0.5


def test_line_is_least_squares():
    assert line([0, 1, 2], [1.0, 3.0, 5.0]) == pytest.approx((2.0, 1.0, 0.0))


def test_winsorising_keeps_this_much_of_a_normal_variance():
    assert kept_variance(8.0) == pytest.approx(1.0)
    assert kept_variance(1.0) == pytest.approx(0.5160, abs=1e-3)  # 1 - 2 phi(1): integrated by hand
