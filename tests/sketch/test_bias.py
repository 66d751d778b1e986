"""A bias over many steps: found where it is, and claimed nowhere else."""

from __future__ import annotations

import math

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.hooks.gradient_record import bias_record
from driftscope.rules.ds117_accumulation_bias import ERRORS, SCORE, STEPS, significant
from driftscope.sketch import BiasTracker, GradientSketch, SketchLayout

SHAPES = {"embed.weight": 9000, "layers.0.weight": 12_000, "layers.1.weight": 12_000, "head.weight": 9000}


def layout(size=4096, seed=0):
    return SketchLayout.of(SHAPES, size, seed=seed)


def vector(generator, size):
    made = {n: torch.randn(c, generator=generator) for n, c in SHAPES.items()}
    whole = math.sqrt(sum(float(v.norm()) ** 2 for v in made.values()))
    return {n: v * (size / whole) for n, v in made.items()}


def sketched(grads, made):
    sketch = GradientSketch(made)
    for name, grad in grads.items():
        sketch.add(name, grad)
    return sketch


def drift(tracker, generator, bias, noise):
    """One step: a gradient b of norm 3, and a = b + 3 (bias + noise), all sketched."""
    b, e = vector(generator, 3.0), vector(generator, noise)
    a = {n: b[n] + 3 * (bias[n] + e[n]) for n in b}
    along = torch.tensor([float((a[n] - b[n]) @ b[n]) / 9 for n in SHAPES])
    return tracker.add(sketched(a, tracker.layout).minus(sketched(b, tracker.layout)), 3.0, along)


def nothing():
    return {n: torch.zeros(c) for n, c in SHAPES.items()}


def test_a_bias_of_1_percent_in_noise_of_10_percent_is_found_within_200_steps():
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        bias, tracker, found = vector(generator, 0.01), BiasTracker(layout()), None
        for step in range(1, 201):
            drift(tracker, generator, bias, 0.1)
            read = tracker.read()
            if found is None and read is not None and significant(bias_record(read)):
                found = step
        assert found is not None and found <= 100
        assert read.size.value == pytest.approx(0.01, abs=3 * read.size.error) and read.size.error < 1e-3
        assert read.noise == pytest.approx(0.1, rel=0.02)


def test_a_single_step_shows_nothing_of_it():
    """The same difference, one step: 10% noise hides a bias of 1%, and its norm is no test."""
    generator = torch.Generator().manual_seed(0)
    with_bias, without = BiasTracker(layout()), BiasTracker(layout())
    for _ in range(2):
        drift(with_bias, generator, vector(generator, 0.01), 0.1)
        drift(without, generator, nothing(), 0.1)
    assert with_bias.read().noise == pytest.approx(without.read().noise, rel=0.05)


@pytest.mark.parametrize("rank", [None, 1, 2, 8])
def test_noise_alone_is_no_bias(rank):
    """200 runs of 100 steps, looked at after every step: noise in every direction, or in one or a few only."""
    made = SketchLayout.of({"m.w": 2560}, 256)
    claimed, worst = 0, 0.0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        tracker = BiasTracker(made)
        basis = torch.randn(rank or 1, 256, generator=generator, dtype=torch.float64)
        for step in range(1, 101):
            if rank is None:
                rows = torch.randn(1, 256, generator=generator, dtype=torch.float64)
            else:
                rows = torch.randn(1, rank, generator=generator, dtype=torch.float64) @ basis
            tracker.add(GradientSketch(made, rows), 10.0, torch.zeros(1))
            if step >= STEPS:
                read = tracker.read()
                claimed += significant(bias_record(read))
                worst = max(worst, min(read.score / SCORE, read.size.value / read.size.error / ERRORS))
    assert claimed == 0
    assert 0.05 < worst < 0.8  # far from 1, at which a bias is claimed, and no constant


def test_the_score_is_in_standard_errors():
    """Its standard deviation over runs without bias is 1, its mean 0."""
    made = SketchLayout.of({"m.w": 2560}, 256)
    scores = []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        tracker = BiasTracker(made)
        for _ in range(60):
            tracker.add(GradientSketch(made, torch.randn(1, 256, generator=generator).double()), 1.0, torch.zeros(1))
        scores.append(tracker.read().score)
    found = torch.tensor(scores)
    assert abs(float(found.mean())) < 0.2
    assert 0.85 < float(found.std()) < 1.2


def test_the_size_is_unbiased_and_its_error_covers():
    """Over hashes and noise: the mean of U is |E d|^2, and two errors of the size hold the truth."""
    inside, squares = 0, []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        bias, tracker = vector(generator, 0.05), BiasTracker(layout(64, seed))
        for _ in range(12):
            drift(tracker, generator, bias, 0.05)
        size = tracker.read().size
        squares.append(size.value**2)
        inside += abs(size.value - 0.05) < 2 * size.error
    assert sum(squares) / 60 == pytest.approx(0.05**2, rel=0.1)
    assert inside >= 54


def test_the_module_that_is_biased_is_named():
    generator = torch.Generator().manual_seed(0)
    bias = nothing() | {"layers.1.weight": vector(generator, 0.02)["layers.1.weight"]}
    tracker = BiasTracker(layout())
    for _ in range(30):
        drift(tracker, generator, bias, 0.05)
    assert tracker.read().module == "layers.1"


def test_a_gradient_that_is_too_short_is_seen_along_it():
    """It turns with every step, so its mean is nothing; along the gradient it is 1%."""
    tracker, generator = BiasTracker(layout()), torch.Generator().manual_seed(0)
    for _ in range(20):
        b = vector(generator, 1.0)
        along = torch.tensor([-0.01 * float(b[n] @ b[n]) * (2 if n.startswith("head") else 0.5) for n in SHAPES])
        tracker.add(sketched({n: -0.01 * v for n, v in b.items()}, tracker.layout), 1.0, along)
    read = tracker.read()
    assert not significant(bias_record(read))
    assert read.along.value == pytest.approx(-0.0082, rel=0.1) and read.along.error < 2e-4
    assert read.along_module == "head"


def test_a_difference_without_noise_is_all_bias():
    tracker = BiasTracker(layout())
    same = sketched(vector(torch.Generator().manual_seed(0), 0.01), tracker.layout)
    for _ in range(STEPS + 8):
        tracker.add(same, 1.0, torch.zeros(4))
    read = tracker.read()
    assert significant(bias_record(read))
    assert read.size.value == pytest.approx(read.noise) and read.size.value == pytest.approx(0.01, rel=0.05)


def test_no_difference_at_all():
    tracker = BiasTracker(layout())
    for _ in range(3):
        tracker.add(sketched(nothing(), tracker.layout), 1.0, torch.zeros(4))
    read = tracker.read()
    assert (read.score, read.noise, read.size) == (0.0, 0.0, (0.0, 0.0))
    assert read.module is None and read.along_module is None


def test_nothing_before_the_second_step():
    tracker = BiasTracker(layout())
    assert tracker.read() is None
    drift(tracker, torch.Generator(), nothing(), 0.1)
    assert tracker.read() is None


@pytest.mark.parametrize(
    ("value", "size"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0), (1.0, float("nan")), (1.0, float("inf"))]
)
def test_a_step_that_is_not_finite_does_not_count(value, size):
    tracker, generator = BiasTracker(layout()), torch.Generator().manual_seed(0)
    for _ in range(3):
        drift(tracker, generator, nothing(), 0.1)
    before = tracker.state()
    rows = torch.ones(4, 4096, dtype=torch.float64)
    rows[2, 17] = value
    assert tracker.add(GradientSketch(tracker.layout, rows), size, torch.zeros(4)) is False
    assert tracker.skipped == 1
    after = tracker.state()
    assert torch.equal(after[2:], before[2:]) and after[0] == before[0]


def test_a_resumed_run_goes_on_where_it_was():
    whole, generator = BiasTracker(layout()), torch.Generator().manual_seed(0)
    bias = vector(generator, 0.01)
    for step in range(10):
        drift(whole, generator, bias, 0.1)
        if step == 4:
            saved, place = whole.state(), generator.get_state()
    assert saved.dtype == torch.float64 and saved.numel() == 7 + 2 * (4 + 4 * 4096)
    resumed = BiasTracker.from_state(layout(), saved)
    generator.set_state(place)
    for _ in range(5):
        drift(resumed, generator, bias, 0.1)
    assert torch.equal(resumed.state(), whole.state())
    assert resumed.read() == whole.read()


def test_a_state_of_something_else_is_refused():
    saved = BiasTracker(layout()).state()
    for other in (layout(2048), layout(seed=1), SketchLayout.of({**SHAPES, "x.w": 3}, 4096)):
        with pytest.raises(UsageError, match="another model"):
            BiasTracker.from_state(other, saved)
    with pytest.raises(UsageError, match="another model"):
        BiasTracker.from_state(layout(), saved[:-1])
    with pytest.raises(UsageError, match="layout has changed"):
        BiasTracker(layout()).add(sketched(nothing(), layout(seed=1)), 1.0, torch.zeros(4))
