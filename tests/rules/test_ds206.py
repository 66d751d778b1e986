from __future__ import annotations

import itertools

import pytest

from driftscope.rules.ds206_group_size import zero_variance
from tests.rules.settings_facts import configured, predicted


@pytest.mark.parametrize(("p", "size"), list(itertools.product((0.1, 0.5, 0.75), (2, 3, 5))))
def test_the_share_is_the_count_over_all_outcomes(p, size):
    equal = 0.0
    for outcome in itertools.product((0, 1), repeat=size):
        if len(set(outcome)) == 1:
            equal += p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
    assert zero_variance(p, size) == pytest.approx(equal)


@pytest.mark.parametrize(("size", "severity"), [(2, "warning"), (3, "warning"), (4, "info"), (6, "info")])
def test_small_groups_are_told_with_their_share(size, severity):
    finding = predicted("DS206", configured(num_generations=size))
    assert finding.severity == severity
    assert f"num_generations={size}" in finding.evidence and "num_generations=8" in finding.remedy


@pytest.mark.parametrize("facts", [configured(num_generations=7), configured(num_generations=8), configured()])
def test_groups_that_are_large_enough_are_not(facts):
    assert predicted("DS206", facts) is None
