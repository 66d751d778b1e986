"""When to measure what: pure functions of the optimizer step, and a cadence that keeps to a budget."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator

from driftscope.records import CadenceRecord, StepRecord, Tier

HORIZON = 1000
"""Steps: a debt over this many steps' income slows the analysed steps further; credit is kept up to as many."""

SPECTRUM_SHARE = 0.75
"""Part of what may be spent on analysed steps that the spectrum tier gets before the deep tier, if it needs it."""

SAMPLES = 5
"""Costs of a tier from which the next one is estimated."""

SLACK = 1.25
"""A tier saves this much faster than its cadence needs, so that rounding and noise do not make it miss a step."""

LONGEST = 10**9
"""Steps: a period that would be longer is never."""

MOST_MS = 24 * 3600e3
"""Times are counted up to this."""


def due(step: int, every: int) -> bool:
    """Whether a probe that runs every ``every`` steps runs on the 1-based ``step``; the first step is always due."""
    return every > 0 and (step - 1) % every == 0


def tier(step: int, *, spectrum_every: int, deep_every: int) -> Tier:
    """The most costly tier due on the 1-based ``step``."""
    if due(step, deep_every):
        return "deep"
    return "spectrum" if due(step, spectrum_every) else "light"


class Cadence:
    """Which tier each step gets, so that Driftscope's share of the run's time stays within ``max_overhead``.

    Every step earns ``max_overhead / (1 - max_overhead)`` of its time. Light steps are paid first. The rest is saved
    for spectrum steps (up to three quarters of it) and deep steps; one is taken where its period has passed and what
    is saved for it covers its usual cost. So both periods stretch, and never shrink below those asked for. Analysed
    steps stay on the grid ``1 + n * spectrum_every``; a stretched deep step takes the grid's next step.

    The usual cost is the median of a tier's last five, or its latest if that is lower. The first one, which may
    compile and tune, is left out: a second spectrum step is taken without knowing its cost, a second deep step for
    half of the first one's. What a step costs beyond its usual cost is a debt: counted in full, and paid back with at
    least half of the income, while the analysed steps go on with the other half (with less of it where the debt is
    over a thousand steps' income). Unspent income covers later debts, up to a thousand steps' worth of it.

    **A young run is over its budget**, and a short one ends so: step 1 and the first two spectrum steps are taken on
    credit. A loan worth n steps' income, light steps paid, is paid back within 2n steps: 10 s at 2% of steps of 0.5 s
    takes 2000. ``record().spent`` tells the share as it is. Where light steps alone cost more than the budget it
    cannot be kept, and no further analysed step is taken once the savings are gone. Costs of many times the median
    that recur leave a debt of a few thousand steps' income standing, so the share nears the budget from above.

    Deterministic: ranks that call it with the same figures get the same tiers. A step of the grid that never came is
    made up for at the next one. ``max_overhead=0`` switches the budget off, a period of 0 the tier.
    """

    def __init__(self, *, spectrum_every: int, deep_every: int, max_overhead: float) -> None:
        self.spectrum_every, self.deep_every, self.max_overhead = spectrum_every, deep_every, max_overhead
        self._rate = max_overhead / (1.0 - max_overhead)  # income per ms of the run's own time
        self._spectrum = _Purse(spectrum_every, first_share=0.0)
        self._deep = _Purse(deep_every, first_share=0.5)
        self._last_deep: int | None = None
        self._debt_ms = 0.0  # negative: credit
        self._own_ms = self._step_ms = 0.0
        self._incomes: deque[float] = deque(maxlen=31)
        self._asked: tuple[int, Tier] | None = None

    def tier(self, step: int) -> Tier:
        """The tier of the coming 1-based optimizer step, asked once the step before it has been accounted for.

        The same answer whenever that step is asked for again.
        """
        if self._asked is None or self._asked[0] != step:
            self._asked = (step, self._decide(step))
        return self._asked[1]

    def _decide(self, step: int) -> Tier:
        if self.max_overhead == 0.0 or step <= 1:
            return tier(step, spectrum_every=self.spectrum_every, deep_every=self.deep_every)
        if self._deep_is_due(step) and self._deep.can_pay():
            return "deep"
        return "spectrum" if due(step, self.spectrum_every) and self._spectrum.can_pay() else "light"

    def _deep_is_due(self, step: int) -> bool:
        """Whether this is a deep step's place on the grid, its period after the one before."""
        since = step - self._last_deep if self._last_deep is not None else None
        if due(step, self.deep_every):
            return since is None or not 0 < since < self.deep_every
        grid = self.spectrum_every or max(1, self.deep_every // 10)
        return since is not None and since >= self.deep_every > 0 and due(step, grid)

    def spend(self, step: int, tier: Tier, own_ms: float, step_ms: float) -> None:
        """Account for a step that has ended, with the same figures on every rank.

        own_ms: Driftscope's time in it; step_ms: the rest of its wall time. Times that are no times (NaN, infinite,
        negative) leave the step out of the account; huge ones count as a day.
        """
        purse = {"light": None, "spectrum": self._spectrum, "deep": self._deep}[tier]
        if tier == "deep":
            self._last_deep = step
        if not (math.isfinite(own_ms) and math.isfinite(step_ms)) or own_ms < 0.0 or step_ms < 0.0:
            return
        own_ms, step_ms = min(own_ms, MOST_MS), min(step_ms, MOST_MS)
        self._own_ms += own_ms
        self._step_ms += step_ms
        income = self._rate * step_ms
        if purse is None:
            income -= own_ms
        else:
            self._debt_ms += purse.charge(own_ms)
        self._incomes.append(income)
        for_spectrum, for_deep = self._shares(income)
        self._debt_ms += for_spectrum + for_deep - income
        self._debt_ms -= self._spectrum.save(for_spectrum) + self._deep.save(for_deep)
        self._debt_ms = max(self._debt_ms, -HORIZON * max(statistics.median(self._incomes), 0.0))

    def _shares(self, income: float) -> tuple[float, float]:
        """What of one step's income is saved for each analysed tier; the rest pays debts or becomes credit."""
        if income <= 0.0:
            return 0.0, 0.0
        if self._debt_ms > 0.0:
            free = income / (1.0 + max(1.0, self._debt_ms / (HORIZON * income)))
        else:
            free = income - self._debt_ms / HORIZON
        spectrum, deep = self._spectrum.wish(), self._deep.wish()
        for_spectrum = min(spectrum, max(SPECTRUM_SHARE * free, free - deep))
        return for_spectrum, min(deep, free - for_spectrum)

    def record(self) -> CadenceRecord:
        """Mean periods as costs and step times are now (0: the budget cannot pay for any), share so far, budget."""
        total = self._own_ms + self._step_ms
        spent = self._own_ms / total if total > 0.0 else None
        if self.max_overhead == 0.0:
            return CadenceRecord(
                spectrum_every=self.spectrum_every, deep_every=self.deep_every, spent=spent, budget=None
            )
        shares = self._shares(statistics.median(self._incomes)) if self._incomes else (math.inf, math.inf)
        return CadenceRecord(
            spectrum_every=self._spectrum.period(shares[0]),
            deep_every=self._deep.period(shares[1]),
            spent=spent,
            budget=self.max_overhead,
        )

    @property
    def starved(self) -> bool:
        """Whether light steps alone cost more than the budget, so that analysed ones end with the savings."""
        wanted = self.max_overhead > 0.0 and max(self.spectrum_every, self.deep_every) > 0
        return wanted and len(self._incomes) == self._incomes.maxlen and statistics.median(self._incomes) <= 0.0

    def resume(self, steps: Iterable[tuple[int, Tier, float, float]]) -> None:
        """Account for the steps of a run that goes on: (step, tier, own_ms, step_ms) each, as ``spend`` took them."""
        for step, tier, own_ms, step_ms in steps:
            self.spend(step, tier, own_ms, step_ms)


class _Purse:
    """What is saved for one analysed tier, and what one step of it usually costs; ms."""

    def __init__(self, every: int, *, first_share: float) -> None:
        self.every = every
        self.saved = 0.0
        self._first_share = first_share  # part of the first one's cost that the second is expected to have
        self._first: float | None = None
        self._costs: deque[float] = deque(maxlen=SAMPLES)

    def cost(self) -> float:
        """What the next one is expected to cost, 0 where nothing is known.

        A low cost is believed at once, a high one when it recurs.
        """
        if self._costs:
            return min(statistics.median_low(self._costs), self._costs[-1])
        return self._first_share * self._first if self._first is not None else 0.0

    def can_pay(self) -> bool:
        """Whether the next one is paid for; one whose cost is not known is taken on credit."""
        return self.saved >= self.cost()

    def wish(self) -> float:
        """What it would save of a step's income."""
        return SLACK * self.cost() / self.every if self.every > 0 else 0.0

    def save(self, amount: float) -> float:
        """Put something in; returns what is more than two steps' cost, which is not kept."""
        self.saved += amount
        over = max(0.0, self.saved - 2.0 * self.cost())
        self.saved -= over
        return over

    def charge(self, own_ms: float) -> float:
        """Pay one step's expected cost from what is saved; returns what it cost beyond that (negative: less)."""
        paid = min(self.cost(), self.saved)
        self.saved -= paid
        if self._first is None:
            self._first = own_ms
        else:
            self._costs.append(own_ms)
        return own_ms - paid

    def period(self, share: float) -> int:
        """Mean steps from one to the next with this much saved per step; 0 is never."""
        cost = self.cost()
        if self.every == 0 or cost == 0.0:
            return self.every
        return max(self.every, math.ceil(cost / share)) if cost < share * LONGEST else 0


def spent(records: Iterable[StepRecord]) -> Iterator[tuple[int, Tier, float, float]]:
    """(step, tier, own_ms, step_ms) of every step on record, for ``Cadence.resume``.

    Micro-batches without a record count like the mean of those that have one.
    """
    for step, group in itertools.groupby(records, key=lambda record: record.step):
        window = list(group)
        known = [r.step_ms for r in window if r.step_ms is not None]
        if known:
            whole = statistics.fmean(known) * (window[0].accumulation or len(window))
            yield step, window[-1].tier, sum(r.overhead_ms for r in window), whole
