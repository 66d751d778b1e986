"""The watched series of a run: what is told, when, and what a resumed run remembers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from driftscope.hooks.drift import DriftWatch
from driftscope.hooks.sampler import EngineSettings
from driftscope.hooks.scope import attach
from driftscope.records import CanaryRecord
from tests.hooks.runs import alerts_of, steps_of, trainer
from tests.record_factory import honest_ratio, stats, step


def record(
    number: int, mean: float, *, std: float = 0.02, gap: float | None = None, floor: float | None = None
) -> Any:
    ratio = honest_ratio()
    ratio.raw_token = stats(mean, level="token", std=std)
    made = step(step=number, ratio=gap if gap is not None else 1.0, is_ratio=ratio)
    if gap is None:
        made.gap = None
    if floor is not None:
        made.canary = CanaryRecord(noise_floor=floor)
    return made


def told(watch: DriftWatch, means: list[float], start: int = 1, **fields: Any) -> list[tuple[int, str, str]]:
    out = []
    for number, mean in enumerate(means, start):
        made = record(number, mean, **fields)
        watch.update(made)
        out += [(number, name, str(s.kind)) for name, s in made.drift.items() if s.fresh]
    return out


def noisy(count: int, seed: int, level: float = 0.0, size: float = 0.003) -> list[float]:
    chance = random.Random(seed)
    return [math.exp(level + chance.gauss(0, size)) for _ in range(count)]


def test_a_shift_of_the_mean_is_told_once_and_honest_noise_is_not():
    watch = DriftWatch()
    assert told(watch, noisy(300, 1), floor=1e-5) == []
    found = told(watch, noisy(100, 2, math.log(1.1)), start=301)
    assert {name for _, name, _ in found} == {"log_is_mean"}
    assert 301 <= found[0][0] <= 400
    assert len(found) <= 2, found  # a spike that turns out to stay is told as a shift


def test_what_lies_within_the_measured_noise_never_alarms():
    watch = DriftWatch()
    told(watch, noisy(300, 1), floor=0.05)  # three times 0.05 is more than log 1.1
    assert told(watch, noisy(100, 2, math.log(1.1)), start=301) == []


def test_a_resumed_run_goes_on_where_it_was():
    records = []
    first = DriftWatch()
    for number, mean in enumerate(noisy(300, 1), 1):
        made = record(number, mean, floor=1e-5)
        first.update(made)
        records.append(made)
    second = DriftWatch()
    second.resume(records)
    after = noisy(100, 2, math.log(1.5))
    assert [t[:2] for t in told(second, after, start=301)] == [t[:2] for t in told(first, after, start=301)] != []


def test_series_that_cannot_be_had_are_absent():
    made = step()
    made.gap, made.is_ratio = None, None
    DriftWatch().update(made)
    assert made.drift == {}


@pytest.mark.slow
def test_a_weight_sync_that_is_lost_in_a_run_is_seen_in_the_light_records_too(tmp_path: Any):
    """The canary looks at every 20th step only; the detectors see each step."""
    lost_at = 60
    from transformers import TrainerCallback

    class Lose(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == lost_at:
                engine = getattr(made, "llm", None) or made.vllm_generation.llm
                engine.model.settings = EngineSettings(stale=True)

    with trainer(tmp_path, max_steps=85, gradient_accumulation_steps=1, max_completion_length=16) as made:
        made.add_callback(Lose())
        with attach(made, tmp_path / "run", spectrum_every=20, deep_every=0, console=False, report=False):
            made.train()
    alarms = [a for a in alerts_of(tmp_path / "run") if a.rule == "DS211"]
    assert alarms
    assert min(a.step for a in alarms) > lost_at
    assert min(a.step for a in alarms) <= lost_at + 10
    looks = {r.step: r.canary.agrees_with for r in steps_of(tmp_path / "run") if r.canary is not None}
    assert looks[81] == "previous"
    assert looks[41] == "current" == looks[1]
