"""What awake steps cost against their asleep neighbours: medians, intervals, and shares at a cadence. No torch."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from driftscope.config import DriftscopeConfig
from driftscope.records import Tier
from driftscope.schedule import Cadence

DRAWS = 2000  # of the bootstrap
TIERS: tuple[Tier, ...] = ("light", "spectrum", "deep")
SIMULATED = 20_000  # steps


@dataclass(frozen=True)
class Step:
    """One timed optimizer step."""

    index: int  # 0-based
    awake: bool
    ms: float
    peak_bytes: int | None = None
    held_bytes: int | None = None  # allocated on the device when the step began


@dataclass(frozen=True)
class Plan:
    """Which steps are awake: two asleep, ``warm`` awake ones that do not count, then cycles; at the end asleep ones.

    cycle: steps from one awake one to the next. With 3, the step after an awake one is judged on its own; with 2, for
    the light tier that is on every step anyway, it serves as a neighbour.
    """

    warm: int
    cycles: int
    cycle: int = 3

    @property
    def first(self) -> int:
        """Index of the first step that counts."""
        return 2 + self.warm

    @property
    def steps(self) -> int:
        """Steps to train; the last one has no end that could be timed."""
        return self.first + self.cycle * (self.cycles + 1)

    def awake(self, index: int) -> bool:
        """Whether Driftscope is awake on a 0-based step."""
        if index < self.first:
            return index >= 2
        place = index - self.first
        return place % self.cycle == self.cycle - 1 and place < self.cycle * self.cycles

    def complete(self, index: int) -> bool:
        """Whether two cycles or more, with asleep neighbours, have been timed when this step begins: a place to stop.

        The step itself is still trained, as the one that has no end.
        """
        place = index - self.first
        return place >= 3 * self.cycle - 1 and place % self.cycle == self.cycle - 1


def interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median with its 95% interval (percentile bootstrap)."""
    chance = random.Random(seed)
    draws = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    return {
        "median": statistics.median(values),
        "low": draws[int(0.025 * DRAWS)],
        "high": draws[int(0.975 * DRAWS) - 1],
        "count": len(values),
    }


def compare(rows: Sequence[Step], plan: Plan) -> dict[str, Any]:
    """Awake steps against the asleep ones next to them; the plan's warm-up does not count.

    ``overhead`` is a share of the asleep step. ``after``: the same for the step after an awake one, which may pay for
    what that has left behind (cycles of 3). ``asleep_against_asleep``: what chance alone gives.
    Raises ValueError where no awake step has an asleep neighbour.
    """
    first, far = plan.first, plan.cycle - 1
    at = {row.index: row for row in rows if row.index >= first - 1}
    places = [i for i, row in at.items() if row.awake and i >= first and _asleep(at, i - 1) is not None]
    if not places:
        raise ValueError("no awake step with an asleep neighbour was timed: give it more steps or more time")
    base = {i: _base(at, i - 1, i + far) for i in places}
    out: dict[str, Any] = {
        "median_step_ms": {
            "awake": statistics.median(at[i].ms for i in places),
            "asleep": statistics.median(base.values()),
        },
        "overhead": interval([at[i].ms / base[i] - 1 for i in places]),
        "overhead_ms": interval([at[i].ms - base[i] for i in places]),
    }
    after = [i for i in places if plan.cycle > 2 and _asleep(at, i + 1) is not None]
    if after:
        out["after"] = interval([at[i + 1].ms / base[i] - 1 for i in after])
        out["after_ms"] = interval([at[i + 1].ms - base[i] for i in after])
    null = [i - 1 for i in places if all(_asleep(at, i - 1 + k) is not None for k in (-plan.cycle, plan.cycle))]
    if null:
        chance = [at[i].ms / _base(at, i - plan.cycle, i + plan.cycle) - 1 for i in null]
        out["asleep_against_asleep"] = interval(chance)
    return out | _memory(rows, at, places)


def _asleep(at: Mapping[int, Step], index: int) -> Step | None:
    row = at.get(index)
    return row if row is not None and not row.awake else None


def _base(at: Mapping[int, Step], *around: int) -> float:
    """Mean time of the asleep steps at these places, as far as they were timed."""
    return statistics.mean(row.ms for i in around if (row := _asleep(at, i)) is not None)


def _memory(rows: Sequence[Step], at: Mapping[int, Step], places: Sequence[int]) -> dict[str, Any]:
    """Peak of awake steps beyond their asleep neighbours', and what stays allocated on the device beside the run."""
    extra = [at[i].peak_bytes - at[i - 1].peak_bytes for i in places  # type: ignore[operator]
             if at[i].peak_bytes is not None and at[i - 1].peak_bytes is not None]  # fmt: skip
    if not extra:
        return {}
    never_awake = next((row.held_bytes for row in rows if row.index == 1), None)
    held = [row.held_bytes for i in places if (row := at[i - 1]).held_bytes is not None]
    out: dict[str, Any] = {
        "asleep_peak_bytes": statistics.median(at[i - 1].peak_bytes or 0 for i in places),
        "extra_peak_bytes": {"median": statistics.median(extra), "largest": max(extra)},
    }
    if never_awake is not None and held:
        out["held_bytes"] = statistics.median(held) - never_awake
    return out


def cost_ms(found: Mapping[str, Any], which: str = "median") -> float:
    """What one awake step of a tier costs, with what the step after it pays. which: ``median``, ``low``, ``high``."""
    after = found["after_ms"]["median"] if "after_ms" in found else 0.0
    return float(found["overhead_ms"][which] + after)


def composed(tiers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The share at the default cadence and under the default budget, from the costs of all three tiers.

    ``low`` and ``high``: with every tier at that end of its interval. ``recorded``: by Driftscope's own account.
    """
    if set(tiers) != set(TIERS):
        return None
    step_ms = statistics.median(found["median_step_ms"]["asleep"] for found in tiers.values())
    costs = {which: {tier: cost_ms(tiers[tier], which) for tier in TIERS} for which in ("median", "low", "high")}
    recorded = {tier: tiers[tier].get("recorded_ms") for tier in TIERS}
    if all(ms is not None for ms in recorded.values()):
        costs["recorded"] = {tier: float(recorded[tier]) for tier in TIERS}
    own = costs.get("recorded", costs["median"])
    return {
        "asleep_step_ms": step_ms,
        "cost_ms": costs,
        "share_as_asked": {which: share(cost, step_ms) for which, cost in costs.items()},
        "under_budget": under_budget(costs["median"], own, step_ms, tiers["deep"].get("first_ms")),
    }


def share(cost_ms: Mapping[Tier, float], step_ms: float) -> float:
    """Part of a long run's time that Driftscope takes at the default cadence, without a budget."""
    spectrum, deep = 1 / DriftscopeConfig.spectrum_every, 1 / DriftscopeConfig.deep_every
    weights: dict[Tier, float] = {"light": 1 - spectrum, "spectrum": spectrum - deep, "deep": deep}
    own = sum(weights[tier] * cost_ms[tier] for tier in TIERS)
    return own / (step_ms + own)


def under_budget(
    cost_ms: Mapping[Tier, float], recorded_ms: Mapping[Tier, float], step_ms: float, first_ms: float | None
) -> dict[str, Any]:
    """What the default budget makes of these costs: its cadence over many steps of this length.

    The cadence is told what Driftscope records; the shares are of what it really costs, where chance makes less than
    nothing of it, of nothing.
    first_ms: cost of the very first analysed step, which compiles and tunes; ``None``: that of any deep step.
    """
    settings = DriftscopeConfig()
    budget = settings.budget
    cadence = Cadence(spectrum_every=settings.spectrum_every, deep_every=settings.deep_every, max_overhead=budget)
    taken = dict.fromkeys(TIERS, 0)
    own = 0.0
    over, early = 0, {}
    for step in range(1, SIMULATED + 1):
        tier = cadence.tier(step)
        begins = step == 1 and first_ms is not None
        cadence.spend(step, tier, max(0.0, first_ms if begins else recorded_ms[tier]), step_ms)
        own += max(0.0, first_ms if begins else cost_ms[tier])
        taken[tier] += 1
        now = own / (own + step * step_ms)
        over = step if now > budget else over
        if step in (200, 1000, 5000):
            early[str(step)] = now
    record = cadence.record()
    return {
        "budget": budget,
        "steps": SIMULATED,
        "share": own / (own + SIMULATED * step_ms),
        "share_recorded": record.spent,
        "share_after_steps": early,
        "within_budget_from_step": over + 1 if over < SIMULATED else None,
        "analysed": {tier: taken[tier] for tier in TIERS[1:]},
        "spectrum_every": record.spectrum_every,
        "deep_every": record.deep_every,
    }
