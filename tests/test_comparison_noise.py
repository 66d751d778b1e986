"""When a difference between two runs is marked: the arithmetic, and real trainers with honest seeds and faults."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from driftscope.comparison import Series, compare, load
from driftscope.comparison.assemble import by_chance
from driftscope.comparison.differences import MIN_PAIRS, difference, independent, paired, spread, student
from tests.test_comparison import changes, marked, marks, series

TESTS = 13  # differences that a comparison of two runs usually makes


# The arithmetic.


@pytest.mark.parametrize(
    ("freedom", "level", "t"),
    [(1, 0.05, 12.706), (2, 0.05, 4.303), (3, 0.01, 5.841), (4, 0.001, 8.610), (10, 0.001, 4.587), (120, 0.001, 3.373),
     (100_000, 0.05, 1.960)],
)  # fmt: skip
def test_students_quantiles_are_those_of_the_tables(freedom, level, t):
    assert student(level, freedom) == pytest.approx(t, abs=6e-4)


def autocorrelated(rng, n, rho):
    value = rng.gauss(0, 1)
    for _ in range(n):
        yield value
        value = rho * value + math.sqrt(1 - rho * rho) * rng.gauss(0, 1)


@pytest.mark.parametrize(
    ("n", "rho", "rate"),
    [(8, 0.0, 0.0001), (8, 0.5, 0.00075), (8, 0.9, 0.0164), (24, 0.0, 0.00005), (24, 0.5, 0.00025), (24, 0.9, 0.003),
     (60, 0.0, 0.0), (60, 0.5, 0.0001), (60, 0.9, 0.001)],
)  # fmt: skip
def test_noise_is_hardly_ever_marked(n, rho, rate):
    """1000 pairs of runs without any difference; ``rate`` is what 20,000 other pairs gave (docs/compare.md)."""
    rng = random.Random(n)
    found = sum(
        difference(
            series(list(autocorrelated(rng, n, rho))), series(list(autocorrelated(rng, n, rho))), floor=0.0,
            tests=TESTS,
        ).exceeds
        for _ in range(1000)
    )  # fmt: skip
    assert found <= 1000 * rate + 4 * math.sqrt(1000 * rate) + 1


@pytest.mark.parametrize(("n", "shift"), [(8, 30), (12, 20), (24, 10), (60, 3)])
def test_a_large_shift_is_marked(n, shift):
    rng = random.Random(0)
    pairs = [([rng.gauss(0, 1) for _ in range(n)], [rng.gauss(shift, 1) for _ in range(n)]) for _ in range(100)]
    assert sum(difference(series(a), series(b), floor=0.0, tests=TESTS).exceeds for a, b in pairs) >= 95


def test_a_shift_below_the_scatter_of_one_step_is_never_marked_however_long_the_run():
    rng = random.Random(0)
    a, b = ([rng.gauss(m, 1) for _ in range(2000)] for m in (0.0, 1.0))
    found = difference(series(a), series(b), floor=0.0, tests=1)
    assert found.median == pytest.approx(1.0, abs=0.15)
    assert not found.exceeds
    assert found.bar == pytest.approx(math.sqrt(2), rel=0.1)


def test_what_both_runs_do_alike_leaves_the_difference_alone():
    warmup = [10 * math.exp(-s / 5) for s in range(24)]
    rng = random.Random(1)
    a = [math.log(v) + rng.gauss(0, 0.01) for v in warmup]
    b = [math.log(1.5 * v) + rng.gauss(0, 0.01) for v in warmup]
    assert difference(series(a), series(b), floor=0.01, tests=TESTS).exceeds


def test_fewer_steps_than_the_least_are_too_few_even_for_a_huge_difference():
    a, b = series([0.0] * 40), series([9.0] * (MIN_PAIRS - 1))
    found = difference(a, b, floor=0.0, tests=1)
    assert (found.pairs, found.median, found.bar, found.exceeds) == (MIN_PAIRS - 1, 9.0, None, False)
    assert difference(series([0.0] * 8), series([9.0] * 8), floor=0.0, tests=1).exceeds


def test_steps_are_paired_by_number_and_the_nearest_stands_in():
    assert paired(series([1, 2, 3]), series([2, 4, 6, 8])) == [1, 2, 3]
    assert paired(series([1, 2, 3, 4]), series([7, 9], start=3)) == [4, 5]
    assert paired(Series((1, 21, 41, 61), (1, 2, 3, 4)), Series((1, 31, 61), (10, 20, 30))) == [9, 17, 26]
    assert paired(Series((1, 31, 61), (10, 20, 30)), Series((1, 21, 41, 61), (1, 2, 3, 4))) == [-9, -17, -26]
    assert paired(series([1, 2]), series([1, 2], start=10)) == []
    assert paired(series([]), series([1])) == []
    one = Series((5,), (1.0,))
    assert paired(one, one) == [0.0]


def test_the_spread_sees_what_a_majority_of_equal_values_hides():
    assert spread([0.0] * 16 + [5.0] * 8) == pytest.approx(2.5)
    assert spread([1.0] * 24) == 0.0
    rng = random.Random(0)
    assert spread([rng.gauss(0, 3) for _ in range(4000)]) == pytest.approx(3, rel=0.05)


def test_steps_that_hang_together_are_worth_fewer():
    rng = random.Random(0)
    loose, tight = (independent(list(autocorrelated(rng, 400, rho))) for rho in (0.0, 0.9))
    assert 250 < loose <= 400
    assert 10 < tight < 21  # 21 is what 400 steps are worth where the correlation is known to be 0.9
    assert independent([1.0, 1.0, 1.0, 1.0, 1.0]) == 5.0


@pytest.mark.parametrize(
    ("count", "mine", "theirs", "gone", "chance"),
    [(1, 24, 24, False, True), (5, 24, 24, False, True), (7, 24, 24, False, False), (24, 24, 24, True, False),
     (1, 20, 1000, False, True), (1, 5, 1000, False, False), (3, 24, 0, False, True), (9, 3, 24, False, False),
     (900_000, 10**6, 10**6, False, False)],
)  # fmt: skip
def test_a_rare_finding_may_be_in_one_run_by_chance(count, mine, theirs, gone, chance):
    assert by_chance(count, mine, theirs, gone) is chance


# Real runs.


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Five honest seeds, one of them with truncated sampling as well: real trainers, recorded."""
    from driftscope.hooks.scope import attach
    from tests.hooks.runs import trainer

    made = {}
    for name, seed, top_p in [*((f"seed{s}", s, 1.0) for s in range(5)), ("cut", 0, 0.8)]:
        directory = tmp_path_factory.mktemp(name)
        with trainer(directory, max_steps=10, seed=seed, top_p=top_p) as one:
            run = directory / name
            scope = attach(one, run, spectrum_every=1, deep_every=0, max_overhead=0.0, console=False, report=False)
            one.train()
            assert scope.guard.off == {}
            scope.detach()
        made[name] = load(run)
    return made


def test_honest_seeds_show_no_marked_difference(real):
    for a, b in combinations([f"seed{s}" for s in range(5)], 2):
        comparison = compare([real[a], real[b]])
        assert marked(comparison) == set()
        assert "within" in marks(comparison).values()
        assert "no figure differs" in comparison.sentences[0]
    together = compare([real[f"seed{s}"] for s in range(5)])
    assert marked(together) == set()
    assert together.replicates == ((0, 1, 2, 3, 4),)
    assert [row.name for row in together.settings] == ["seed"]


def test_the_same_real_run_twice_agrees_exactly(real):
    comparison = compare([real["seed0"], real["seed0"]])
    assert marked(comparison) == set()
    assert [r.label for r in comparison.runs] == ["seed0", "seed0 (2)"]
    assert comparison.settings == ()
    assert comparison.replicates == ()
    assert any("the same run as seed0" in note for note in comparison.notes)
    for row in comparison.figures:
        assert row.cells[0].value == row.cells[1].value


def test_truncated_sampling_is_found_in_the_figures_the_settings_and_the_findings(real):
    comparison = compare([real["seed0"], real["cut"]])
    found = {figure for _, figure in marked(comparison)}
    assert found >= {"is_ratio", "k1", "k3", "live_grad_norm", "hidden_grad_norm"}
    assert marks(comparison)["is_ratio"] == "worse"
    assert marks(comparison)["live_grad_norm"] == "differs"
    assert not found & {"coef_error", "residual", "step_ms", "overhead"}
    assert [(row.name, row.values) for row in comparison.settings] == [("top_p", ("1", "0.8"))]
    assert changes(comparison)["DS201"] == "new"
    assert comparison.headline.startswith("seed0 ")
    assert "cut has critical findings" in comparison.headline
    assert any("One recorded setting differs: top_p, 1 to 0.8." in s for s in comparison.sentences)
    back = compare([real["seed0"], real["cut"]], baseline=1)
    assert marks(back, 0)["is_ratio"] == "better"
    assert changes(back, 0)["DS201"] == "gone"


def test_with_further_seeds_the_effect_still_stands_out(real):
    comparison = compare([real["seed0"], real["seed1"], real["seed2"], real["cut"]])
    assert {label for label, _ in marked(comparison)} == {"cut"}
    assert "is_ratio" in {figure for _, figure in marked(comparison)}


def test_liger_against_trls_own_path_on_a_biased_ratio(tmp_path):
    """What trains becomes right, and its gradient shrinks with the ratio: both are told."""
    from driftscope.hooks.scope import attach
    from tests.hooks.runs import HAS_LIGER_LOSS, trainer

    if not HAS_LIGER_LOSS:
        pytest.skip("this TRL has no Liger loss that could train")
    columns = []
    for name, liger in (("liger", True), ("reference", False)):
        with trainer(tmp_path / name, liger=liger, max_steps=10, top_p=0.8) as one:
            scope = attach(
                one, tmp_path / name / "run", spectrum_every=1, deep_every=0, max_overhead=0.0, console=False,
                report=False,
            )  # fmt: skip
            one.train()
            scope.detach()
        columns.append(load(tmp_path / name / "run"))
    comparison = compare(columns)
    assert [r.label for r in comparison.runs] == ["liger/run", "reference/run"]
    assert [r.live for r in comparison.runs] == ["liger", "reference"]
    found = marks(comparison)
    assert (found["coef_error"], found["live_grad_norm"]) == ("better", "differs")
    assert found["is_ratio"] == found["gap"] == found["k1"] == "within"
    change = next(row for row in comparison.figures if row.figure.id == "live_grad_norm").cells[1].change
    assert 0.03 < change < 0.3
    assert changes(comparison)["DS102"] == "better"
    assert changes(comparison)["DS201"] == "same"
