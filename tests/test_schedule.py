"""The cadence keeps its budget, measures as often as it can afford, and tells what it spends."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftscope.records import StepRecord, Tier
from driftscope.schedule import Cadence, spent, tier

BUDGET = 0.02
INCOME = BUDGET / (1 - BUDGET)  # of a step, per ms of its time
TOLERANCE = 1.03  # of the budget, once loans are paid back
TIERS: tuple[Tier, ...] = ("light", "spectrum", "deep")
Cost = Callable[[int, Tier], float]


@dataclass
class Simulated:
    """A run under a cadence: the tiers that it gave, and the share after every step."""

    cadence: Cadence
    tiers: list[Tier] = field(default_factory=list)
    calls: list[tuple[int, Tier, float, float]] = field(default_factory=list)
    share: list[float] = field(default_factory=list)

    def at(self, *wanted: Tier) -> list[int]:
        return [call[0] for call in self.calls if call[1] in wanted]

    def gaps(self, *wanted: Tier, since: int = 0) -> list[int]:
        return [b - a for a, b in itertools.pairwise(s for s in self.at(*wanted) if s >= since)]


def make(spectrum_every: int = 20, deep_every: int = 1000, max_overhead: float = BUDGET) -> Cadence:
    return Cadence(spectrum_every=spectrum_every, deep_every=deep_every, max_overhead=max_overhead)


def simulate(cadence: Cadence, steps: int, own_ms: Cost, step_ms: Callable[[int], float], start: int = 1) -> Simulated:
    run, own, rest = Simulated(cadence), 0.0, 0.0
    for step in range(start, start + steps):
        given = cadence.tier(step)
        call = (step, given, own_ms(step, given), step_ms(step))
        cadence.spend(*call)
        own, rest = own + call[2], rest + call[3]
        run.tiers.append(given)
        run.calls.append(call)
        run.share.append(own / (own + rest))
    return run


def costs(light: float, spectrum: float, deep: float, first: float = 1.0) -> Cost:
    """Fixed costs; the very first analysed step costs ``first`` times as much."""
    by_tier = {"light": light, "spectrum": spectrum, "deep": deep}
    return lambda step, given: by_tier[given] * (first if step == 1 else 1.0)


def steady(ms: float) -> Callable[[int], float]:
    return lambda _: ms


# -- what was asked for, where the budget allows it ---------------------------------------------------------------


def test_without_a_budget_the_cadence_is_as_asked_whatever_it_costs():
    run = simulate(make(3, 7, 0.0), 100, costs(50, 5000, 1e7), steady(10))
    assert run.tiers == [tier(s, spectrum_every=3, deep_every=7) for s in range(1, 101)]
    record = run.cadence.record()
    assert (record.spectrum_every, record.deep_every, record.budget) == (3, 7, None)
    assert record.spent == pytest.approx(run.share[-1])


@pytest.mark.parametrize("every", [(20, 1000), (30, 1000), (1, 10), (20, 0), (0, 100), (0, 0), (7, 7), (50, 3)])
def test_an_ample_budget_changes_nothing(every):
    run = simulate(make(*every), 2500, costs(0.01, 1, 3), steady(10_000))
    assert run.tiers == [tier(s, spectrum_every=every[0], deep_every=every[1]) for s in range(1, 2501)]
    record = run.cadence.record()
    assert (record.spectrum_every, record.deep_every) == every


def test_zero_periods_are_never():
    assert set(simulate(make(0, 0), 500, costs(0, 1, 1), steady(100)).tiers) == {"light"}
    assert set(simulate(make(0, 100), 500, costs(0, 1, 1), steady(1000)).tiers) == {"light", "deep"}
    assert set(simulate(make(10, 0), 500, costs(0, 1, 1), steady(1000)).tiers) == {"light", "spectrum"}


def test_the_first_step_is_analysed_before_anything_is_earned():
    assert make().tier(1) == "deep"
    assert make(deep_every=0).tier(1) == "spectrum"
    assert make(spectrum_every=0, deep_every=0).tier(1) == "light"


def test_nothing_is_claimed_before_the_first_step():
    record = make().record()
    assert record.spent is None
    assert (record.spectrum_every, record.deep_every, record.budget) == (20, 1000, BUDGET)


# -- the budget -----------------------------------------------------------------------------------------------------

PROFILES = {
    "as measured on one H200, 0.5B": (costs(2.3, 108, 3750, first=3), steady(460), 4000),
    "spectrum four times the step": (costs(1.0, 2000, 4000), steady(500), 4000),
    "deep a hundred times the step": (costs(1.0, 50, 50_000), steady(500), 20_000),
    "light takes most of the budget": (costs(8.0, 100, 1000), steady(460), 8000),
    "first step compiles for a minute": (costs(0.5, 100, 60_000), steady(5000), 4000),
    "steps grow tenfold": (costs(2.0, 108, 3750), lambda s: 460 if s < 8000 else 4600, 4000),
    "steps shrink tenfold": (costs(2.0, 108, 3750), lambda s: 4600 if s < 8000 else 460, 4000),
    "steps alternate by ten": (costs(1.0, 108, 3750), lambda s: 4600 if (s // 500) % 2 else 460, 4000),
    # Its first deep step of 20 s instead of 2 is a loan again, worth 2200 steps.
    "costs grow tenfold": (lambda s, t: costs(1, 60, 2000)(s, t) * (10 if s > 8000 and t != "light" else 1),
                           steady(460), 13_000),
}  # fmt: skip


@pytest.mark.parametrize("name", PROFILES)
def test_the_share_of_the_whole_run_stays_within_the_budget_after_the_loans(name):
    own_ms, step_ms, paid_back = PROFILES[name]
    run = simulate(make(), 2 * max(paid_back, 8000), own_ms, step_ms)
    assert max(run.share[paid_back:]) <= BUDGET * TOLERANCE
    assert run.cadence.record().spent == pytest.approx(run.share[-1])
    assert len(run.at("spectrum")) > 20
    assert len(run.at("deep")) > (1 if "hundred" not in name and "minute" not in name else 0)


def test_noise_and_outliers_of_thirty_times_the_cost_now_and_then():
    chance = random.Random(0)

    def own_ms(_: int, given: Tier) -> float:
        usual = {"light": 1.0, "spectrum": 200.0, "deep": 4000.0}[given] * chance.lognormvariate(0, 0.5)
        return usual * (30 if given == "spectrum" and chance.random() < 0.02 else 1)

    run = simulate(make(), 60_000, own_ms, lambda _: 460 * chance.lognormvariate(0, 0.5))
    assert run.share[-1] <= BUDGET * TOLERANCE
    assert run.share[-1] >= BUDGET * 0.8  # and what it has is used
    assert len(run.at("spectrum")) > 500


profiles = st.fixed_dictionaries(
    {
        "light": st.floats(0, 0.6),  # of the income
        "spectrum": st.floats(0.1, 200),  # in steps' income
        "deep": st.floats(0.1, 400),
        "first": st.floats(1, 3),
        "budget": st.floats(0.001, 0.3),
        "every": st.tuples(st.integers(0, 50), st.integers(0, 400)),
        "swing": st.sampled_from([1.0, 3.0, 10.0]),  # of the step time, from one half of a thousand steps to the other
        "noise": st.floats(0, 0.5),
        "seed": st.integers(0, 1000),
    }
)


def drawn(profile: dict, steps: int) -> Simulated:
    """A run of the profile; the costs are in units of a short step's income."""
    chance = random.Random(profile["seed"])
    unit = profile["budget"] / (1 - profile["budget"]) * 100.0

    def own_ms(step: int, given: Tier) -> float:
        noise = 1 + profile["noise"] * (2 * chance.random() - 1)
        return profile[given] * unit * noise * (profile["first"] if step == 1 and given != "light" else 1.0)

    def step_ms(step: int) -> float:
        return 100.0 * (profile["swing"] if step % 1000 > 500 else 1.0)

    return simulate(make(*profile["every"], profile["budget"]), steps, own_ms, step_ms)


@settings(max_examples=40, deadline=None)
@given(profiles)
def test_any_profile_keeps_its_budget_and_never_starves(profile):
    run = drawn(profile, 12_000)
    spectrum_every, deep_every = profile["every"]
    # The loans, of 1600 steps' income at most, are paid back from 0.4 of a step's income or more in 8000 steps.
    assert run.share[-1] <= profile["budget"] * TOLERANCE
    assert not run.gaps("deep") or min(run.gaps("deep")) >= deep_every
    if spectrum_every:
        assert all((s - 1) % spectrum_every == 0 or (s - 1) % deep_every == 0 for s in run.at("spectrum", "deep"))
        free = 1 - profile["light"] * (1 + profile["noise"])
        loan = profile["first"] * max(profile["deep"], profile["spectrum"]) + 2 * profile["spectrum"]
        slow = 1 + max(1.0, 1.6 * loan / (1000 * free))  # half of the income or less is left while a loan is open
        wait = spectrum_every + 1.5 * profile["spectrum"] / (0.75 * free / slow)
        assert max(run.gaps("spectrum", "deep"), default=0) <= wait
        assert len(run.at("spectrum", "deep")) >= 12_000 // wait


def test_a_spectrum_step_comes_again_although_deep_steps_cost_far_too_much():
    run = simulate(make(), 30_000, costs(1, 50, 100_000), steady(460))
    assert max(run.gaps("spectrum", "deep")) <= 160  # while the loan of 12,000 steps' income is paid back
    assert max(run.gaps("spectrum", "deep", since=12_000)) <= 60  # and for the second one
    assert statistics.mean(run.gaps("spectrum", "deep", since=12_000)) <= 30
    assert len(run.at("deep")) <= 2


def test_a_young_run_is_over_its_budget_and_says_so():
    run = simulate(make(), 100, costs(1, 100, 10_000), steady(500))
    record = run.cadence.record()
    assert record.spent == pytest.approx(run.share[-1])
    assert record.spent > 5 * BUDGET


def test_a_loan_is_paid_back_in_the_time_that_the_docstring_states():
    run = simulate(make(), 2001, costs(0, 0, 10_000), steady(500))
    assert run.share[900] > BUDGET  # the loan is worth 980 steps: not before
    assert run.share[1999] <= BUDGET


# -- robustness -----------------------------------------------------------------------------------------------------


def test_one_outlier_of_a_hundred_times_the_cost_is_paid_back_without_a_long_silence():
    def own_ms(step: int, given: Tier) -> float:
        return {"light": 0.5, "spectrum": 150.0, "deep": 0.0}[given] * (100 if step == 5001 else 1)

    run = simulate(make(deep_every=0), 12_000, own_ms, steady(460))
    assert run.calls[5000][1] == "spectrum"
    assert run.share[5000] > BUDGET
    before = statistics.mean(run.gaps("spectrum")[100:200])
    assert max(run.gaps("spectrum", since=4500)) <= 6 * before
    assert statistics.mean(run.gaps("spectrum", since=11_000)) == pytest.approx(before, rel=0.15)
    assert run.share[-1] <= BUDGET * TOLERANCE


def test_the_first_step_counts_in_full_and_does_not_set_the_cadence():
    run = simulate(make(deep_every=0), 8000, costs(0.5, 100, 0, first=100), steady(460))
    assert run.share[0] > 0.9
    assert run.at("spectrum")[:2] == [1, 21]  # the second shows what one really costs
    assert max(run.gaps("spectrum")) <= 60
    assert set(run.gaps("spectrum", since=4000)) == {20}
    assert run.share[-1] <= BUDGET


def test_costs_that_were_high_for_a_while_are_forgotten_with_the_first_low_one():
    def own_ms(step: int, given: Tier) -> float:
        return {"light": 0.5, "spectrum": 60.0, "deep": 0.0}[given] * (
            50 if given == "spectrum" and 2000 < step < 8000 else 1
        )

    run = simulate(make(deep_every=0), 12_000, own_ms, steady(460))
    dear = run.gaps("spectrum", since=6000)[0]
    assert dear > 200
    first_low = next(s for s in run.at("spectrum") if s >= 8000)
    assert max(run.gaps("spectrum", since=first_low)) <= 40


def test_unspent_income_pays_for_an_outlier():
    def own_ms(step: int, given: Tier) -> float:
        return {"light": 0.0, "spectrum": 150.0, "deep": 0.0}[given] * (10 if step == 5001 else 1)

    run = simulate(make(deep_every=0), 6000, own_ms, steady(460))
    assert run.calls[5000][1] == "spectrum"
    assert set(run.gaps("spectrum", since=3000)) == {20}
    assert run.share[-1] <= BUDGET


def test_long_steps_bring_analysed_steps_back_where_light_ones_had_used_up_the_budget():
    run = simulate(make(), 4000, costs(12, 100, 1000), lambda s: 400 if s <= 2000 else 8000)
    assert not [s for s in run.at("spectrum", "deep") if 41 < s <= 2000]
    assert len([s for s in run.at("spectrum", "deep") if s > 3000]) >= 45


def test_a_budget_that_light_steps_use_up_is_on_record_as_never():
    record = simulate(make(), 500, costs(12, 100, 1000), steady(400)).cadence.record()
    assert (record.spectrum_every, record.deep_every) == (0, 0)
    assert record.spent > BUDGET


@pytest.mark.parametrize(
    ("cadence", "light_ms", "starved"),
    [(make(), 12, True), (make(), 4, False), (make(max_overhead=0.0), 12, False), (make(0, 0), 12, False)],
)
def test_it_says_where_light_steps_use_up_the_budget(cadence, light_ms, starved):
    assert simulate(cadence, 500, costs(light_ms, 100, 1000), steady(400)).cadence.starved is starved


def test_one_dear_light_step_is_not_the_end():
    run = simulate(make(), 200, lambda s, t: 300 if t == "light" and s % 20 == 7 else 1, steady(400))
    assert not run.cadence.starved


def test_the_period_on_record_is_the_one_that_is_kept():
    run = simulate(make(deep_every=0), 20_000, costs(1, 500, 0), steady(460))
    kept = statistics.mean(run.gaps("spectrum", since=10_000))
    assert kept > 40
    assert run.cadence.record().spectrum_every == pytest.approx(kept, rel=0.1)


TIMES = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-308, 1e300]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1e4),
)
CALLS = st.lists(st.tuples(st.sampled_from(TIERS), TIMES, TIMES), max_size=60)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.integers(0, 30), st.integers(0, 50), st.floats(0, 0.999))
def test_no_time_however_wrong_breaks_it(calls, spectrum_every, deep_every, max_overhead):
    cadence = make(spectrum_every, deep_every, max_overhead)
    for step, (given_tier, own_ms, step_ms) in enumerate(calls, 1):
        assert cadence.tier(step) in TIERS
        cadence.spend(step, given_tier, own_ms, step_ms)
        record = cadence.record()
        assert record.spent is None or 0.0 <= record.spent <= 1.0
        assert record.spectrum_every == 0 or record.spectrum_every >= spectrum_every > 0
        assert record.deep_every == 0 or record.deep_every >= deep_every > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -5.0])
def test_a_time_that_is_none_leaves_the_account_alone(bad):
    cadence = make()
    cadence.spend(1, "deep", 10.0, 990.0)
    cadence.spend(2, "light", bad, 1000.0)
    cadence.spend(3, "light", 1.0, bad)
    assert cadence.record().spent == pytest.approx(0.01)


def test_a_clock_that_jumps_does_not_silence_it_or_set_it_free():
    def step_ms(step: int) -> float:
        return 1e15 if step == 3000 else 460.0

    run = simulate(make(), 12_000, costs(1, 1000, 3750), step_ms)
    late = [call for call in run.calls if call[0] > 3000]
    share = sum(c[2] for c in late) / sum(c[2] + c[3] for c in late)
    assert share <= 1.2 * BUDGET  # the credit of a day is not spent: a thousand steps' worth of it at most
    assert max(run.gaps("spectrum", since=3000)) <= 400


def test_a_step_of_the_grid_that_never_came_is_made_up_for_at_the_next():
    cadence = make()
    for step in (s for s in range(1, 100) if s != 41):
        cadence.spend(step, cadence.tier(step), 0.01, 1000.0)
        assert (cadence.tier(step) != "light") == ((step - 1) % 20 == 0)


# -- the same for all, and after a restart --------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(profiles, st.integers(1, 1500))
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(profile, stop):
    whole = drawn(profile, 1600)
    resumed = make(*profile["every"], profile["budget"])
    resumed.resume(iter(whole.calls[:stop]))
    for step, *rest in whole.calls[stop:]:
        assert resumed.tier(step) == rest[0]
        resumed.spend(step, *rest)
    assert resumed.record() == whole.cadence.record()


@settings(max_examples=20, deadline=None)
@given(profiles, st.integers(0, 10))
def test_the_same_figures_give_the_same_tiers_however_often_one_asks(profile, seed):
    chance, whole = random.Random(seed), drawn(profile, 1000)
    other = make(*profile["every"], profile["budget"])
    for call in whole.calls:
        assert all(other.tier(call[0]) == call[1] for _ in range(chance.randint(1, 3)))
        other.spend(*call)
        assert other.tier(call[0]) == call[1]  # also when it is over
        other.record()
    assert other.record() == whole.cadence.record()


def test_a_run_that_goes_back_to_an_older_checkpoint_goes_on():
    cadence = make(20, 100)
    simulate(cadence, 350, costs(0.1, 1, 5), steady(1000))
    again = simulate(cadence, 350, costs(0.1, 1, 5), steady(1000), start=151)
    assert again.at("deep")[0] == 201
    assert {(s - 1) % 20 for s in again.at("spectrum")} == {0}


def test_what_was_spent_is_read_from_records():
    def record(at: int, micro_step: int, tier: str, own: float, ms: float | None) -> StepRecord:
        return StepRecord(
            step=at, micro_step=micro_step, tier=tier, live="liger", accumulation=4, overhead_ms=own, step_ms=ms
        )

    records = [
        *(record(1, m, "deep", 50.0, 100.0 + m) for m in range(4)),
        record(2, 3, "light", 1.0, 90.0),
        record(3, 3, "light", 1.0, None),  # nothing is known of it
        record(21, 2, "spectrum", 30.0, 80.0),
    ]
    assert list(spent(records)) == [
        (1, "deep", 200.0, 406.0),
        (2, "light", 1.0, 360.0),
        (21, "spectrum", 30.0, 320.0),
    ]
