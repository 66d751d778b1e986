"""The fused GRPO loss: every loss type and option against the float64 oracle, and what it does not compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.kernels import fused_linear_grpo, fused_linear_grpo_loss, passes
from driftscope.kernels.token_terms import is_token_local
from driftscope.spec import LossSpec
from tests.algebra_batches import B, T
from tests.kernels.conftest import INTERPRETED
from tests.kernels.head_problems import (
    LOSSES,
    TERMS,
    assert_as_exact_as_plain,
    error,
    head_problem,
    plain,
    spec_of,
    to_device,
)

WORKSPACE = 5 * 64 * 8  # a few rows: several tiles, the last one short
NARROW = (torch.bfloat16, torch.float16)


def fused(problem, spec, *, factor=1.0, workspace_bytes=WORKSPACE):
    """The loss and its gradients, divided by the factor that the loss was multiplied by."""
    hidden, weight, bias = leaves = problem.leaves()
    loss = fused_linear_grpo_loss(
        hidden, weight, problem.targets, problem.batch, spec, bias=bias, workspace_bytes=workspace_bytes
    )
    grads = torch.autograd.grad(loss * factor, leaves)
    return loss, [g.double() / factor for g in grads]


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("on_policy", [False, True], ids=["off", "on"])
def test_every_loss_and_option_agrees_with_the_oracle(loss, terms, on_policy, device):
    spec = spec_of(loss, terms)
    for dtype in (torch.float32,) if INTERPRETED else (torch.float32, torch.float64):
        problem = head_problem(spec, dtype, device, on_policy=on_policy)
        assert_as_exact_as_plain(problem, spec, *fused(problem, spec))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("terms", ["bare", "kl_bias_delta", "entropy_bonus", "head", "sequence_ratio"])
@pytest.mark.parametrize("loss", ["dapo", "cispo", "sapo"])
def test_narrow_dtypes_are_as_exact_as_plain_pytorch(loss, terms, dtype, device):
    spec = spec_of(loss, terms)
    problem = head_problem(spec, dtype, device, on_policy=True)
    assert_as_exact_as_plain(problem, spec, *fused(problem, spec))


@pytest.mark.parametrize(
    ("change", "local"),
    [
        ({}, True),
        ({"loss_type": "grpo"}, True),
        ({"loss_type": "sapo", "beta": 0.1, "entropy_coef": 0.1}, True),
        ({"loss_type": "vespo"}, False),
        ({"loss_type": "luspo"}, False),
        ({"importance_sampling_level": "sequence"}, False),
        ({"off_policy_threshold": 0.5}, False),
        ({"top_entropy_quantile": 0.5}, False),
        ({"is_correction": True}, True),
    ],
)
def test_one_pass_where_a_token_stands_for_itself_and_two_elsewhere(change, local, device, monkeypatch):
    spec = LossSpec(**{"loss_type": "dapo", **change})
    problem = head_problem(spec, torch.float32, device)
    assert is_token_local(spec, problem.batch) is local
    projected = count_projected(monkeypatch)
    fused(problem, spec)
    scored = int(problem.batch.completion_mask_BT.sum())
    assert (sum(projected) <= scored) is local


def test_the_ratio_of_the_present_policy_to_the_engine_needs_two_passes():
    spec = LossSpec(is_correction=True, is_mode="sequence_mask")
    problem = head_problem(spec, torch.float32, on_policy=True)
    assert not is_token_local(spec, problem.batch)
    assert is_token_local(spec, replace(problem.batch, is_ratio=torch.ones(B, T)))


def count_projected(monkeypatch) -> list[int]:
    """Rows of every product with the head from now on."""
    projected: list[int] = []
    real = passes.raw_logits
    monkeypatch.setattr(passes, "raw_logits", lambda b, h, w: projected.append(h.shape[0]) or real(b, h, w))
    return projected


def test_padding_tools_and_zero_advantages_are_not_even_projected(device, monkeypatch):
    spec = LossSpec(tool_mask=True)
    problem = head_problem(spec, torch.float32, device, on_policy=True)
    batch = problem.batch
    alive = (batch.completion_mask_BT * batch.tool_mask_BT).bool() & (batch.advantages != 0)[:, None]
    hidden = problem.hidden.clone()
    hidden[~alive] = float("nan")
    poisoned = replace(problem, hidden=hidden)
    projected = count_projected(monkeypatch)
    loss, grads = fused(poisoned, spec)
    assert sum(projected) == int(alive.sum())
    assert grads[0][~alive].eq(0).all()
    assert_as_exact_as_plain(problem, spec, loss, grads)


def test_log_probs_of_every_completion_token_on_request(device, monkeypatch):
    spec = LossSpec()
    problem = head_problem(spec, torch.float32, device, on_policy=True)
    projected = count_projected(monkeypatch)
    hidden, weight, bias = problem.leaves()
    found = fused_linear_grpo(
        hidden, weight, problem.targets, problem.batch, spec, bias=bias, workspace_bytes=WORKSPACE
    )
    mask = problem.batch.completion_mask_BT
    assert sum(projected) == int(mask.sum())
    wide = [t.detach().double() for t in (hidden, weight, bias)]
    from tests.kernels.head_problems import logprobs

    logps, entropies = logprobs(problem, spec, *wide)
    assert error(found.logps_BT, logps * mask) < 1e-6
    assert error(found.entropies_BT, entropies * mask) < 1e-6
    assert not found.logps_BT.requires_grad
    assert_as_exact_as_plain(problem, spec, found.loss, torch.autograd.grad(found.loss, (hidden, weight, bias)))


def test_clipped_tokens_cost_no_backward_product(device, monkeypatch):
    """Most ratios far outside of the clip range: their rows are moved out of the tile before the products."""
    spec = LossSpec(epsilon_low=0.01, epsilon_high=0.01)
    problem = head_problem(spec, torch.float32, device)
    added = []
    real = passes.GradientSums.add
    monkeypatch.setattr(passes.GradientSums, "add", lambda s, t, h, r: added.append(t.shape[0]) or real(s, t, h, r))
    loss, grads = fused(problem, spec, workspace_bytes=1 << 20)
    alive = plain_coefficients(problem, spec) != 0
    assert 0 < int(alive.sum()) == sum(added) < int(problem.batch.completion_mask_BT.sum())
    assert grads[0][~alive].eq(0).all()
    assert_as_exact_as_plain(problem, spec, loss, grads)


def plain_coefficients(problem, spec):
    from driftscope.algebra import coefficients
    from tests.kernels.head_problems import logprobs

    wide = [t.detach().double() for t in (problem.hidden, problem.weight, problem.bias)]
    logps, _ = logprobs(problem, spec, *wide)
    return coefficients(spec, replace(problem.batch, logps_BT=logps)).logps_BT


@pytest.mark.parametrize("terms", ["bare", "sequence_ratio"])
def test_a_wholly_masked_batch_has_a_zero_loss_and_zero_gradients(terms, device):
    spec = spec_of("dapo", terms)
    problem = head_problem(spec, torch.float32, device)
    nothing = torch.zeros_like(problem.batch.completion_mask_BT)
    problem = replace(problem, batch=replace(problem.batch, completion_mask_BT=nothing))
    loss, grads = fused(problem, spec)
    assert float(loss.detach()) == 0.0
    assert all(g.eq(0).all() for g in grads)


@pytest.mark.parametrize("vocabulary", [2, 65, 1001])
@pytest.mark.parametrize("terms", ["bare", "head", "sequence_ratio"])
def test_odd_vocabularies(terms, vocabulary, device):
    spec = spec_of("dapo", terms)
    problem = head_problem(spec, torch.float32, device, vocabulary=vocabulary)
    assert_as_exact_as_plain(problem, spec, *fused(problem, spec, workspace_bytes=1 << 16))


@pytest.mark.parametrize("terms", ["bare", "sequence_ratio"])
def test_a_single_token(terms, device):
    spec = spec_of("grpo", terms)
    whole = head_problem(spec, torch.float32, device, on_policy=True)
    batch = replace(
        whole.batch,
        **{k: v[:1, :1] for k, v in vars(whole.batch).items() if isinstance(v, torch.Tensor) and v.dim() == 2},
        advantages=whole.batch.advantages[:1],
    )
    problem = replace(whole, hidden=whole.hidden[:1, :1], targets=whole.targets[:1, :1], batch=batch)
    assert_as_exact_as_plain(problem, spec, *fused(problem, spec))


@pytest.mark.parametrize("spread", [30.0, 1000.0])
def test_extreme_logits(spread, device):
    spec = LossSpec()
    problem = head_problem(spec, torch.float32, device, on_policy=True, spread=spread)
    loss, grads = fused(problem, spec)
    assert all(torch.isfinite(g).all() for g in grads)
    assert_as_exact_as_plain(problem, spec, loss, grads)


@pytest.mark.parametrize("terms", ["bare", "sequence_ratio"])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 0.37), (torch.bfloat16, 0.3), (torch.float16, 65536.0)])
def test_a_scaled_loss_scales_every_gradient(dtype, factor, terms, device):
    """Loss scaling and accumulation: the factor arrives after the gradients were made."""
    spec = spec_of("dapo", terms)
    problem = head_problem(spec, dtype, device, on_policy=True)
    loss, grads = fused(problem, spec, factor=factor)
    assert_as_exact_as_plain(problem, spec, loss, grads)


def test_float16_keeps_gradients_that_it_cannot_hold_unscaled(device):
    """Coefficients of 1e-8: in float16 the tile would round to zero."""
    spec = LossSpec()
    problem = head_problem(spec, torch.float16, device, on_policy=True)
    problem = replace(problem, batch=replace(problem.batch, num_items_in_batch=1e8))
    _, true = plain(problem, spec, torch.float64)
    _, grads = fused(problem, spec, factor=65536.0)
    for mine, truth in zip(grads, true, strict=True):
        assert error(mine, truth) < 2e-3


def test_the_backward_can_run_twice(device):
    spec = LossSpec()
    problem = head_problem(spec, torch.bfloat16, device, on_policy=True)
    leaves = problem.leaves()
    loss = fused_linear_grpo_loss(*leaves[:2], problem.targets, problem.batch, spec, bias=leaves[2])
    once = torch.autograd.grad(loss * 0.5, leaves, retain_graph=True)
    again = torch.autograd.grad(loss * 0.5, leaves)
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_frozen_head_gets_no_gradient_and_the_trunk_the_same(device):
    spec = LossSpec()
    problem = head_problem(spec, torch.float32, device)
    hidden, weight, bias = problem.leaves()
    fused_linear_grpo_loss(
        hidden, weight.detach(), problem.targets, problem.batch, spec, bias=bias.detach(), workspace_bytes=WORKSPACE
    ).backward()
    _, grads = fused(problem, spec)
    assert weight.grad is None
    assert error(hidden.grad, grads[0]) < 1e-6


@pytest.mark.parametrize("terms", ["bare", "sequence_ratio"])
def test_without_gradients_the_loss_is_the_same_and_nothing_is_kept(terms, device, monkeypatch):
    spec = spec_of("dapo", terms)
    problem = head_problem(spec, torch.float32, device)
    loss, _ = fused(problem, spec)
    leaves = problem.leaves()
    added = []
    monkeypatch.setattr(passes.GradientSums, "add", lambda s, t, h, r: added.append(1))
    with torch.no_grad():
        quiet = fused_linear_grpo_loss(
            *leaves[:2], problem.targets, problem.batch, spec, bias=leaves[2], workspace_bytes=WORKSPACE
        )
    assert not quiet.requires_grad
    assert float(quiet) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert added == []


def test_an_adapter_on_the_head_goes_through_the_weight_that_it_makes(device):
    spec = LossSpec()
    problem = head_problem(spec, torch.float32, device)
    g = torch.Generator().manual_seed(9)
    a, b = ((torch.randn(*s, generator=g) * 0.3).to(device) for s in ((2, 9), (37, 2)))
    merged = replace(problem, weight=problem.weight + 2.0 * b @ a)
    _, true = plain(merged, spec, torch.float64)
    a.requires_grad_(True), b.requires_grad_(True)
    weight = problem.weight + 2.0 * b @ a
    loss = fused_linear_grpo_loss(
        problem.hidden, weight, problem.targets, problem.batch, spec, bias=problem.bias, workspace_bytes=WORKSPACE
    )
    loss.backward()
    assert error(a.grad, 2.0 * b.detach().double().t() @ true[1]) < 1e-5
    assert error(b.grad, 2.0 * true[1] @ a.detach().double().t()) < 1e-5


def test_tied_embeddings_sum_both_uses(device):
    spec = LossSpec()
    problem = head_problem(spec, torch.float32, device)
    weight = problem.weight.detach().clone().requires_grad_(True)
    hidden = weight[problem.targets] + problem.hidden
    fused_linear_grpo_loss(hidden, weight, problem.targets, problem.batch, spec, workspace_bytes=WORKSPACE).backward()
    apart = replace(problem, hidden=hidden.detach(), bias=torch.zeros_like(problem.bias))
    _, true = plain(apart, spec, torch.float64)
    total = true[1].index_add(0, problem.targets.reshape(-1), true[0].reshape(-1, true[0].shape[-1]))
    assert error(weight.grad, total) < 1e-5


def test_uncomputed_tokens_do_not_disturb_the_algebra(device):
    """Old log-probs at padding are whatever the trainer left there."""
    spec = LossSpec(importance_sampling_level="sequence")
    problem = head_problem(spec, torch.float32, device)
    old = problem.batch.old_logps_BT.clone()
    old[problem.batch.completion_mask_BT == 0] = -1e4
    garbage = replace(problem, batch=replace(problem.batch, old_logps_BT=old))
    loss, grads = fused(garbage, spec)
    expected, true = fused(problem, spec)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert error(grads[0], true[0]) < 1e-6


@pytest.mark.parametrize(
    ("spec", "batch", "said"),
    [
        (LossSpec(beta=0.1), {"ref_logps_BT": None}, "reference log-probs"),
        (LossSpec(), {"num_items_in_batch": None}, "num_items_in_batch"),
        (LossSpec(head_adapter=True), {}, "W \\+ scaling \\* B @ A"),
        (LossSpec(is_correction=True), {"sampling_logps_BT": None}, "sampling log-probs"),
    ],
)
def test_what_the_loss_needs_and_lacks_is_named(spec, batch, said):
    problem = head_problem(spec, torch.float32)
    problem = replace(problem, batch=replace(problem.batch, **batch))
    with pytest.raises(UsageError, match=said):
        fused(problem, spec)


def test_shapes_that_do_not_match_are_named():
    problem = head_problem(LossSpec(), torch.float32)
    with pytest.raises(UsageError, match="expected \\(B, T, D\\)"):
        fused_linear_grpo_loss(
            problem.hidden.reshape(-1, 9), problem.weight, problem.targets, problem.batch, LossSpec()
        )


def test_integer_masks_and_masks_on_the_device_are_taken_as_they_come(device):
    spec = LossSpec(tool_mask=True)
    problem = head_problem(spec, torch.float32, device)
    assert not problem.batch.completion_mask_BT.is_floating_point()
    as_bool = replace(problem.batch, completion_mask_BT=problem.batch.completion_mask_BT.bool())
    loss, _ = fused(problem, spec)
    same, _ = fused(replace(problem, batch=to_device(as_bool, device)), spec)
    assert float(loss.detach()) == float(same.detach())
