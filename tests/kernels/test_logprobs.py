"""Fused log-probs and entropies: values and every gradient against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.kernels import fused_linear_logprobs
from driftscope.kernels.naive import linear_logprobs
from tests.kernels.conftest import INTERPRETED
from tests.kernels.head_problems import EPSILON, SHARE, error

DTYPES = [torch.float32, torch.bfloat16, torch.float16] + ([] if INTERPRETED else [torch.float64])
TRANSFORMS = [
    {},
    {"temperature": 0.7},
    {"softcap": 2.0, "logit_scale": 0.3, "temperature": 1.5},
    {"logit_scale": -0.5},
]


def problem(dtype, device, rows=13, size=8, vocabulary=101, spread=1.0):
    g = torch.Generator().manual_seed(5)
    shapes = ((rows, size), (vocabulary, size), (vocabulary,))
    leaves = [(torch.randn(*s, generator=g, dtype=torch.float64) * spread).to(device, dtype) for s in shapes]
    targets = torch.randint(vocabulary, (rows,), generator=g).to(device)
    weights = torch.randn(2, rows, generator=g, dtype=torch.float64).to(device)
    return [t.requires_grad_(True) for t in leaves], targets, weights


def results(function, leaves, targets, weights, **options):
    """Values, and gradients of a random combination of log-probs and entropies."""
    hidden, weight, bias = leaves
    logps, entropies = function(hidden, weight, targets, bias=bias, **options)
    total = (logps * weights[0]).sum() + (entropies * weights[1]).sum()
    return [logps.detach(), entropies.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_as_exact_as_plain_pytorch(dtype, device, transform):
    leaves, targets, weights = problem(dtype, device)
    wide = [t.detach().double().requires_grad_(True) for t in leaves]
    true = results(linear_logprobs, wide, targets, weights, **transform)
    theirs = results(linear_logprobs, leaves, targets, weights, **transform)
    options = {**transform, "with_entropy": True, "workspace_bytes": 3 * 128 * leaves[0].element_size()}
    mine = results(fused_linear_logprobs, leaves, targets, weights, **options)
    for name, a, b, truth in zip(("logps", "entropies", "hidden", "weight", "bias"), mine, theirs, true, strict=True):
        bound = SHARE * error(b, truth) + EPSILON[dtype]
        assert error(a, truth) <= bound, f"{name}: {error(a, truth):.2e} over {bound:.2e}"


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 257, 1000])
@pytest.mark.parametrize("rows", [1, 5])
def test_odd_sizes(device, rows, vocabulary):
    leaves, targets, weights = problem(torch.float32, device, rows=rows, size=3, vocabulary=vocabulary)
    wide = [t.detach().double().requires_grad_(True) for t in leaves]
    true = results(linear_logprobs, wide, targets, weights)
    mine = results(fused_linear_logprobs, leaves, targets, weights, with_entropy=True)
    for a, truth in zip(mine, true, strict=True):
        assert float((a.double() - truth).norm()) <= 4 * EPSILON[torch.float32] * max(1.0, float(truth.norm()))


@pytest.mark.skipif(INTERPRETED, reason="float64 never runs in Triton")
def test_derivatives_against_finite_differences():
    leaves, targets, _ = problem(torch.float64, "cpu", rows=3, size=4, vocabulary=7)

    def fused(hidden, weight, bias):
        return fused_linear_logprobs(
            hidden, weight, targets, bias=bias, softcap=2.0, temperature=0.8, with_entropy=True, workspace_bytes=1024
        )

    assert torch.autograd.gradcheck(fused, leaves)


def test_rows_outside_the_mask_are_zero_and_have_no_gradient(device):
    leaves, targets, weights = problem(torch.float32, device)
    mask = (torch.arange(13, device=device) % 3 != 0).long()
    with torch.no_grad():
        leaves[0][mask == 0] = float("nan")
    logps, entropies, grad, *_ = results(
        fused_linear_logprobs, leaves, targets, weights, mask=mask, with_entropy=True, workspace_bytes=2048
    )
    assert logps[mask == 0].eq(0).all() and entropies[mask == 0].eq(0).all() and grad[mask == 0].eq(0).all()
    hidden = [leaves[0].detach()[mask == 1].requires_grad_(True), *leaves[1:]]
    kept = results(linear_logprobs, hidden, targets[mask == 1], weights[:, mask == 1])
    assert error(logps[mask == 1], kept[0].double()) < 1e-6
    assert error(grad[mask == 1], kept[2].double()) < 1e-5


def test_shapes_follow_the_targets_and_entropies_come_only_when_asked_for(device):
    leaves, targets, _ = problem(torch.float32, device, rows=12)
    logps, entropies = fused_linear_logprobs(leaves[0].view(3, 4, 8), leaves[1], targets.view(3, 4))
    assert logps.shape == (3, 4)
    assert entropies is None


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_stay_as_exact_as_plain_pytorch(device, size):
    leaves, targets, weights = problem(torch.float32, device, spread=size**0.5)
    wide = [t.detach().double().requires_grad_(True) for t in leaves]
    true = results(linear_logprobs, wide, targets, weights)
    theirs = results(linear_logprobs, leaves, targets, weights)
    mine = results(fused_linear_logprobs, leaves, targets, weights, with_entropy=True)
    for a, b, truth in zip(mine, theirs, true, strict=True):
        assert error(a, truth) <= SHARE * error(b, truth) + EPSILON[torch.float32]


def test_forbidden_tokens_have_no_probability_and_no_nan(device):
    leaves, targets, weights = problem(torch.float32, device)
    with torch.no_grad():
        leaves[2][50:] = float("-inf")
    targets = targets % 50
    mine = results(fused_linear_logprobs, leaves, targets, weights, with_entropy=True)
    cut = [leaves[0], leaves[1].detach()[:50].requires_grad_(True), leaves[2].detach()[:50].requires_grad_(True)]
    true = results(linear_logprobs, cut, targets, weights)
    for a, truth in zip(mine[:3], true[:3], strict=True):
        assert error(a, truth.double()) < 1e-5
    assert error(mine[3][:50], true[3].double()) < 1e-5
    assert mine[3][50:].eq(0).all()


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
def test_nan_is_passed_on(device):
    leaves, targets, _ = problem(torch.float32, device)
    with torch.no_grad():
        leaves[0][4, 2] = float("nan")
    logps, entropies = fused_linear_logprobs(*leaves[:2], targets, with_entropy=True)
    assert torch.isnan(logps).nonzero().squeeze(1).tolist() == [4]
    assert torch.isnan(entropies).nonzero().squeeze(1).tolist() == [4]


def test_only_rows_with_a_gradient_are_projected_again(device, monkeypatch):
    from driftscope.kernels import passes

    projected = []
    real = passes.raw_logits
    monkeypatch.setattr(passes, "raw_logits", lambda b, h, w: projected.append(h.shape[0]) or real(b, h, w))
    leaves, targets, _ = problem(torch.float32, device)
    logps, _ = fused_linear_logprobs(*leaves[:2], targets)
    assert sum(projected) == 13
    projected.clear()
    (logps * (torch.arange(13, device=device) < 4)).sum().backward()
    assert sum(projected) == 4
    assert leaves[0].grad[4:].eq(0).all()
    assert leaves[0].grad[:4].ne(0).any()


def test_a_workspace_of_less_than_a_row_is_refused(device):
    leaves, targets, _ = problem(torch.float32, device)
    with pytest.raises(UsageError, match="one row of logits, 512 bytes"):
        fused_linear_logprobs(*leaves[:2], targets, workspace_bytes=511)


def test_the_workspace_bounds_the_tile(device, monkeypatch):
    from driftscope.kernels import passes

    seen = []
    real = passes.raw_logits
    monkeypatch.setattr(passes, "raw_logits", lambda b, h, w: seen.append(b.numel() * 4) or real(b, h, w))
    leaves, targets, _ = problem(torch.float32, device)
    fused_linear_logprobs(*leaves[:2], targets, workspace_bytes=5000)
    assert 0 < max(seen) <= 5000


def test_autocast_computes_in_its_dtype_and_returns_the_parameters(device):
    leaves, targets, weights = problem(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        mine = results(fused_linear_logprobs, leaves, targets, weights, with_entropy=True)
    wide = [t.detach().double().requires_grad_(True) for t in leaves]
    true = results(linear_logprobs, wide, targets, weights)
    narrow = [t.detach().bfloat16().requires_grad_(True) for t in leaves]
    theirs = results(linear_logprobs, narrow, targets, weights)
    assert all(a.dtype == torch.float32 for a in mine)
    for a, b, truth in zip(mine, theirs, true, strict=True):
        assert error(a, truth) <= SHARE * error(b, truth) + EPSILON[torch.bfloat16]
    assert error(mine[0], true[0]) > 1e-5, "autocast had no effect"
