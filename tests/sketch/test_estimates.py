"""The figures against the exact ones over many draws of the hash: their errors, and what their error bars cover."""

from __future__ import annotations

import math

import pytest
import torch

from driftscope.sketch import GradientSketch, Pair, SketchLayout, cosine, difference, norm, ratio

DRAWS = 200
FIGURES = {"norm": norm, "ratio": ratio, "cosine": cosine, "difference": difference}


def plain(count, generator):
    return torch.randn(count, generator=generator, dtype=torch.float64)


def heavy_tailed(count, generator):
    """Student t with three degrees of freedom."""
    chi = sum(torch.randn(count, generator=generator, dtype=torch.float64) ** 2 for _ in range(3))
    return plain(count, generator) / (chi / 3).sqrt()


def outlier_column(count, generator):
    """One hidden dimension of 64 carries most: the same place in every row of the parameter."""
    values = plain(count, generator)
    values[5::64] *= 30
    return values


def few_rows(count, generator):
    """An embedding: one row in fifty has a gradient at all."""
    rows = plain(count, generator).view(-1, 64)
    rows[torch.rand(rows.shape[0], generator=generator) > 0.02] = 0.0
    return rows.reshape(-1)


def flat(count, generator):
    """All equal: only the signs tell coordinates apart."""
    return torch.ones(count, dtype=torch.float64)


def exact(a, b):
    return {
        "norm": float(a.norm()),
        "ratio": float(a.norm() / b.norm()),
        "cosine": float(a @ b / a.norm() / b.norm()),
        "difference": float((a - b).norm() / b.norm()),
    }


def draws(a, b, size, rows):
    """Figures of ``DRAWS`` hashes: name -> (values, errors). rows: lengths of the modules."""
    names = {f"m{i}.w": n for i, n in enumerate(rows)}
    out = {name: [] for name in FIGURES}
    for seed in range(DRAWS):
        layout = SketchLayout.of(names, size, seed=seed)
        made = []
        for whole in (a, b):
            sketch = GradientSketch(layout)
            for name, part in zip(names, whole.split(rows), strict=True):
                sketch.add(name, part)
            made.append(sketch)
        pair = Pair.of(*made)
        for name, figure in FIGURES.items():
            out[name].append(figure(pair))
    return {name: torch.tensor(found, dtype=torch.float64).T for name, found in out.items()}


@pytest.mark.parametrize("kind", [plain, heavy_tailed, outlier_column, few_rows, flat])
@pytest.mark.parametrize("angle", [0.02, 0.6, math.pi / 2])
@pytest.mark.parametrize("rows", [[25_600], [512, 6400, 6400, 12_288]], ids=["one module", "four modules"])
def test_error_bars_cover_what_they_claim(kind, angle, rows):
    generator = torch.Generator().manual_seed(11)
    b = kind(sum(rows), generator)
    noise = kind(sum(rows), generator) * torch.randn(sum(rows), generator=generator, dtype=torch.float64)
    a = 1.3 * (math.cos(angle) * b / b.norm() + math.sin(angle) * noise / noise.norm())
    found, true = draws(a, b / b.norm(), 512, rows), exact(a, b / b.norm())
    for name, (values, errors) in found.items():
        z = (values - true[name]) / errors
        # over 200 draws: the standard deviation of z is known to 5%, its mean to 7%
        assert 0.8 < float(z.std()) < 1.2, (name, float(z.std()))
        assert abs(float(z.mean())) < 0.3, (name, float(z.mean()))
        assert float((z.abs() < 2).double().mean()) > 0.9, name


def test_the_worst_case_at_4096_buckets_is_four_percent():
    """Two independent vectors in a single module: theory says 1/sqrt(k) = 1.6%, 4.0% at the 99th percentile."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(140_000, generator=generator, dtype=torch.float64) for _ in range(2))
    values, errors = draws(a, b, 4096, [140_000])["ratio"]
    off = (values / exact(a, b)["ratio"]).log().abs()
    assert float(errors.mean()) == pytest.approx(1 / 64, rel=0.03)
    assert float((off < 1 / 64).double().mean()) == pytest.approx(0.68, abs=0.1)
    assert 0.028 < float(off.quantile(0.99)) < 0.052


def test_a_small_angle_makes_a_small_error():
    """Both sides share the hash: a ratio of nearly parallel gradients is nearly exact."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(60_000, generator=generator, dtype=torch.float64)
    a = 100 * b + 0.1 * torch.randn(60_000, generator=generator, dtype=torch.float64)
    values, errors = draws(a, b, 512, [60_000])["ratio"]
    assert float((values / exact(a, b)["ratio"] - 1).abs().max()) < 2e-4
    assert float(errors.max()) < 1e-2  # of 100


def test_equal_gradients_are_equal():
    b = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    sketch = GradientSketch(SketchLayout.of({"m.w": 10_000}, 64))
    sketch.add("m.w", b)
    pair = Pair.of(sketch, sketch)
    assert ratio(pair) == (1.0, 0.0)
    assert difference(pair) == (0.0, 0.0)
    assert cosine(pair) == pytest.approx((1.0, 0.0), abs=1e-7)


def test_more_modules_make_the_total_more_exact():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(64_000, generator=generator, dtype=torch.float64) for _ in range(2))
    one, many = draws(a, b, 64, [64_000])["ratio"], draws(a, b, 64, [4000] * 16)["ratio"]
    assert float(many[0].std()) < 0.4 * float(one[0].std())  # theory: a quarter
