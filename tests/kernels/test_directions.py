"""Directions of log-prob and entropy in hidden space: against the float64 reference, and what they do not compute."""

from __future__ import annotations

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.kernels import linear_directions
from driftscope.kernels.naive import linear_logprobs
from driftscope.kernels.products import row_products
from tests.kernels.conftest import INTERPRETED
from tests.kernels.head_problems import EPSILON, SHARE, error

DTYPES = [torch.float32, torch.bfloat16, torch.float16] + ([] if INTERPRETED else [torch.float64])
TRANSFORMS = [
    {},
    {"temperature": 0.7},
    {"softcap": 2.0, "logit_scale": 0.3, "temperature": 1.5},
    {"logit_scale": -0.5},
]
NAMES = ("u", "w", "logps", "entropies")


def problem(dtype, device, rows=13, size=8, vocabulary=101, spread=1.0):
    g = torch.Generator().manual_seed(5)
    shapes = ((rows, size), (vocabulary, size), (vocabulary,))
    tensors = [(torch.randn(*s, generator=g, dtype=torch.float64) * spread).to(device, dtype) for s in shapes]
    return *tensors, torch.randint(vocabulary, (rows,), generator=g).to(device)


def by_autograd(function, hidden, weight, bias, targets, **options):
    """u, w, log-probs and entropies by two backward passes."""
    leaf = hidden.detach().requires_grad_(True)
    logps, entropies = function(leaf, weight, targets, bias=bias, **options)
    (u,) = torch.autograd.grad(logps.sum(), leaf, retain_graph=True)
    (w,) = torch.autograd.grad(entropies.sum(), leaf)
    return u, w, logps.detach(), entropies.detach()


def truth(hidden, weight, bias, targets, **options):
    return by_autograd(linear_logprobs, hidden.double(), weight.double(), bias.double(), targets, **options)


def parts(found):
    return found.u_ND, found.w_ND, found.logps_N, found.entropies_N


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_are_as_exact_as_plain_pytorch(dtype, transform, with_entropy, device):
    hidden, weight, bias, targets = problem(dtype, device)
    true = truth(hidden, weight, bias, targets, **transform)
    plain = by_autograd(linear_logprobs, hidden, weight, bias, targets, **transform)
    bytes_of_three_rows = 3 * 128 * hidden.element_size() * (2 if with_entropy else 1)
    found = linear_directions(
        hidden, weight, targets, bias=bias, with_entropy=with_entropy, workspace_bytes=bytes_of_three_rows, **transform
    )
    assert (found.w_ND is not None) is with_entropy
    for name, mine, theirs, wanted in zip(NAMES, parts(found), plain, true, strict=True):
        if mine is None:
            continue
        assert mine.dtype == torch.promote_types(dtype, torch.float32)
        bound = SHARE * error(theirs, wanted) + EPSILON[dtype]
        assert error(mine, wanted) <= bound, f"{name}: {error(mine, wanted):.2e} over {bound:.2e}"


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 257, 1000])
@pytest.mark.parametrize("rows", [1, 5])
def test_odd_sizes(device, rows, vocabulary):
    hidden, weight, bias, targets = problem(torch.float32, device, rows=rows, size=3, vocabulary=vocabulary)
    true = truth(hidden, weight, bias, targets)
    found = linear_directions(hidden, weight, targets, bias=bias, with_entropy=True)
    for mine, wanted in zip(parts(found), true, strict=True):
        assert float((mine.double() - wanted).norm()) <= 4 * EPSILON[torch.float32] * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_directions_are_not_rounded_to_the_dtype_of_the_products(dtype, device, monkeypatch):
    """Float32 to the last product: the same logit gradients in float64 give the same directions."""
    if device == "cuda" and not hasattr(torch.ops.aten.addmm, "dtype_out"):
        pytest.skip("this torch cannot write a wide product")
    from driftscope.kernels import directions

    tiles = []
    real = directions.wide_product_
    monkeypatch.setattr(directions, "wide_product_", lambda o, a, b: tiles.append(a.clone()) or real(o, a, b))
    hidden, weight, bias, targets = problem(dtype, device, rows=64, size=96, vocabulary=301, spread=0.3)
    found = linear_directions(hidden, weight, targets, bias=bias, workspace_bytes=1 << 15)
    assert len(tiles) > 1
    assert error(found.u_ND, torch.cat(tiles).double() @ weight.double()) < 1e-6
    assert error(found.u_ND.to(dtype), found.u_ND.double()) > 1e-4


def test_no_rows(device):
    hidden, weight, bias, targets = problem(torch.float32, device)
    for with_entropy in (False, True):
        found = linear_directions(hidden[:0], weight, targets[:0], bias=bias, with_entropy=with_entropy)
        assert found.u_ND.shape == (0, 8)
        assert found.logps_N.shape == found.entropies_N.shape == (0,)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_stay_as_exact_as_plain_pytorch(device, size):
    hidden, weight, bias, targets = problem(torch.float32, device, spread=size**0.5)
    true = truth(hidden, weight, bias, targets)
    plain = by_autograd(linear_logprobs, hidden, weight, bias, targets)
    found = linear_directions(hidden, weight, targets, bias=bias, with_entropy=True)
    for mine, theirs, wanted in zip(parts(found), plain, true, strict=True):
        assert error(mine, wanted) <= SHARE * error(theirs, wanted) + EPSILON[torch.float32]


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
def test_nan_stays_in_its_row(device):
    hidden, weight, _, targets = problem(torch.float32, device)
    hidden[4, 2] = float("nan")
    found = linear_directions(hidden, weight, targets, with_entropy=True)
    for value in parts(found):
        bad = torch.isnan(value.reshape(13, -1)).any(1)
        assert bad.nonzero().squeeze(1).tolist() == [4]


def test_two_products_a_tile_and_none_for_the_weight(device, monkeypatch):
    from driftscope.kernels import directions, passes

    counted = []
    for module, name in ((passes, "raw_logits"), (directions, "wide_product_")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _real=real, _name=name: counted.append(_name) or _real(*a))
    hidden, weight, bias, targets = problem(torch.float32, device)
    weight.requires_grad_(True)
    found = linear_directions(hidden, weight, targets, bias=bias, workspace_bytes=5 * 128 * 4)
    assert counted == ["raw_logits", "wide_product_"] * 3
    assert weight.grad is None
    assert not found.u_ND.requires_grad
    counted.clear()
    linear_directions(hidden, weight, targets, bias=bias, workspace_bytes=10 * 128 * 4, with_entropy=True)
    assert counted == ["raw_logits", "wide_product_", "wide_product_"] * 3


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_workspace_bounds_the_tiles(device, monkeypatch, with_entropy):
    from driftscope.kernels import passes

    seen = []
    real = passes.raw_logits
    monkeypatch.setattr(passes, "raw_logits", lambda b, h, w: seen.append(b.numel() * 4) or real(b, h, w))
    hidden, weight, bias, targets = problem(torch.float32, device)
    linear_directions(hidden, weight, targets, bias=bias, workspace_bytes=5000, with_entropy=with_entropy)
    assert 0 < max(seen) * (2 if with_entropy else 1) <= 5000


def test_wrong_shapes_and_a_workspace_of_less_than_a_row_are_refused(device):
    hidden, weight, _, targets = problem(torch.float32, device)
    with pytest.raises(UsageError, match="one row of logits, 512 bytes"):
        linear_directions(hidden, weight, targets, workspace_bytes=511)
    with pytest.raises(UsageError, match="targets has shape"):
        linear_directions(hidden, weight, targets[:-1])


def test_autocast_computes_in_its_dtype(device):
    hidden, weight, bias, targets = problem(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = linear_directions(hidden, weight, targets, bias=bias)
    true = truth(hidden, weight, bias, targets)[0]
    assert 1e-5 < error(found.u_ND, true) < 2e-2


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.float32)])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 63), (3, 896), (2, 2500)])
def test_products_of_rows_are_exact_to_float64(shape, dtypes, device):
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=g, dtype=torch.float64).to(device, d) for d in dtypes)
    aa, ab, bb = row_products(a, b)
    for found, x, y in ((aa, a, a), (ab, a, b), (bb, b, b)):
        assert found.dtype == torch.float64
        wanted, size = (x.double() * y.double()).sum(-1), (x.double() * y.double()).abs().sum(-1)
        assert (found - wanted).abs().le(1e-14 * size).all()


def test_products_of_strided_and_narrow_rows(device):
    a = torch.randn(6, 20, generator=torch.Generator().manual_seed(2)).to(device)[:, ::2]
    b = a.bfloat16()
    _, ab, bb = row_products(a, b)
    torch.testing.assert_close(ab, (a.double() * b.double()).sum(-1))
    torch.testing.assert_close(bb, (b.double() ** 2).sum(-1))
