"""Sketches of whole gradients: linear over micro-batches, shards and ranks, and honest about what is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftscope.errors import UsageError
from driftscope.sketch import (
    ExactGradient,
    GradientSketch,
    Pair,
    SketchLayout,
    cosine,
    difference,
    exact_pair,
    norm,
    ratio,
)
from driftscope.sketch import modules as parts

SHAPES = {"embed.weight": (50, 8), "mlp.up.weight": (8, 33), "mlp.up.bias": (33,), "norm.weight": (8,)}
ROUNDING = 1e-14  # float64 sums in another order


def layout(size=64, **options):
    return SketchLayout.of({n: torch.Size(s).numel() for n, s in SHAPES.items()}, size, **options)


def gradient(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def sketched(grads, made=None, **options):
    sketch = GradientSketch(made or layout(), **options)
    for name, grad in grads.items():
        sketch.add(name, grad)
    return sketch


def close(a, b):
    return float((a.rows_RK - b.rows_RK).norm()) <= ROUNDING * float(b.rows_RK.norm())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.floats(-10, 10), st.integers(0, 2**40))
def test_it_is_linear(seed, scale, hash_seed):
    made = layout(seed=hash_seed)
    a, b = gradient(seed), gradient(seed + 1)
    both = GradientSketch(made)
    for name in SHAPES:
        both.add(name, a[name])
        both.add(name, b[name], scale=scale)
    whole = sketched({n: a[n] + scale * b[n] for n in SHAPES}, made)
    assert float((both.rows_RK - whole.rows_RK).norm()) <= ROUNDING * (20 + abs(scale) * 20)


def test_shards_of_ranks_add_up_to_the_whole():
    """Two ranks hold rows of each parameter; a rank may hold nothing of one."""
    grads = gradient(0)
    ranks = []
    for rank in range(3):
        sketch = GradientSketch(layout())
        for name, grad in grads.items():
            rows = -(-grad.shape[0] // 3)
            shard = grad[rank * rows : (rank + 1) * rows]
            sketch.add(name, shard, offset=rank * rows * (grad.numel() // grad.shape[0]))
        ranks.append(sketch.rows_RK)
    assert close(GradientSketch(layout(), sum(ranks)), sketched(grads))


def test_rows_are_modules():
    rows = sketched({**gradient(0), "embed.weight": torch.zeros(50, 8)}).rows_RK
    assert rows.shape == (3, 64) and rows.dtype == torch.float64
    assert not rows[0].any() and rows[1].any() and rows[2].any()


def test_a_module_of_one_block_is_exact():
    grads = gradient(0)
    row = sketched(grads).rows_RK[2]
    assert float(row.norm()) == pytest.approx(float(grads["norm.weight"].norm()), rel=1e-14)


def test_nothing_added_is_a_zero_gradient():
    empty = GradientSketch(layout())
    assert empty.rows_RK.shape == (3, 64) and not empty.rows_RK.any()
    assert norm(Pair.of(empty, empty)) == (0.0, 0.0)
    for figure in (ratio, cosine, difference):
        assert figure(Pair.of(empty, empty)) is None
    assert parts(Pair.of(empty, empty)) == []
    some = sketched(gradient(0))
    assert ratio(Pair.of(empty, some)) == (0.0, 0.0)
    assert difference(Pair.of(empty, some)).value == pytest.approx(1.0)
    assert cosine(Pair.of(empty, some)) is None
    assert ratio(Pair.of(some, empty)) is None and difference(Pair.of(some, empty)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named_and_stays_in_its_module(value):
    grads = gradient(0, torch.bfloat16)
    grads["mlp.up.bias"][3] = value
    sketch = sketched(grads)
    assert sketch.nonfinite() == ["mlp.up"]
    assert sketched(gradient(0)).nonfinite() == []
    good = torch.tensor([True, False, True])
    assert torch.equal(sketch.rows_RK[good], sketched(gradient(0, torch.bfloat16)).rows_RK[good])
    exact = ExactGradient(layout())
    for name, grad in grads.items():
        exact.add(name, grad)
    assert exact.nonfinite() == ["mlp.up"]


def test_unknown_parameters_and_other_layouts_are_refused():
    sketch = sketched(gradient(0))
    with pytest.raises(UsageError, match=r"'lm_head\.weight'"):
        sketch.add("lm_head.weight", torch.ones(3))
    with pytest.raises(UsageError, match="two layouts"):
        sketch.minus(sketched(gradient(0), layout(seed=1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exact_products_are_those_of_the_whole_vectors(dtype):
    a, b = gradient(0, dtype), gradient(1, dtype)
    kept = []
    for grads in (a, b):
        held = ExactGradient(layout())
        for name, grad in grads.items():
            held.add(name, grad)
            held.add(name, grad, scale=0.5)
        kept.append(held)
    pair = exact_pair(kept[0].grads.get, kept[1].grads.get, layout())
    x, y = (1.5 * torch.cat([g[n].double().reshape(-1) for n in SHAPES]) for g in (a, b))
    assert norm(pair) == pytest.approx((float(x.norm()), 0.0), rel=1e-6)
    assert norm(pair, "b") == pytest.approx((float(y.norm()), 0.0), rel=1e-6)
    assert ratio(pair) == pytest.approx((float(x.norm() / y.norm()), 0.0), rel=1e-6)
    assert ratio(pair.swapped()) == pytest.approx((float(y.norm() / x.norm()), 0.0), rel=1e-6)
    assert cosine(pair) == pytest.approx((float(x @ y / x.norm() / y.norm()), 0.0), rel=1e-5)
    assert difference(pair) == pytest.approx((float((x - y).norm() / y.norm()), 0.0), rel=1e-6)
    assert sum(m.share for m in parts(pair)) == pytest.approx(1.0)


def test_exact_sums_are_wide():
    """A thousand bf16 gradients of 1 + 2^-7: a sum in bf16 stops growing at 256."""
    held = ExactGradient(layout())
    for _ in range(1000):
        held.add("norm.weight", torch.full((8,), 1 + 2.0**-7, dtype=torch.bfloat16))
    assert held.grads["norm.weight"].tolist() == [1000 * (1 + 2.0**-7)] * 8


def test_an_exact_gradient_does_not_share_the_trainers_memory():
    held, grad = ExactGradient(layout()), torch.ones(8)
    held.add("norm.weight", grad)
    held.add("norm.weight", grad)
    assert grad.tolist() == [1.0] * 8


def test_missing_gradients_are_zero_in_exact_products():
    a, b = {"norm.weight": torch.ones(8)}, {"mlp.up.bias": torch.ones(33)}
    pair = exact_pair(a.get, b.get, layout())
    assert (norm(pair).value, norm(pair, "b").value) == pytest.approx((8**0.5, 33**0.5))
    assert cosine(pair).value == 0.0
    assert [m.name for m in parts(pair)] == ["mlp.up", "norm"]
    assert parts(pair)[0].cosine is None
    assert parts(pair, 1)[0].share == pytest.approx(33 / 41)
