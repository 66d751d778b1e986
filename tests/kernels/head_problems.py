"""Small head problems with a float64 truth: shared by the tests of the kernels.

A path's error is judged against the truth of the same, already rounded inputs, beside plain PyTorch's own error in the
same dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from driftscope.algebra import coefficients
from driftscope.batch import TokenBatch
from driftscope.kernels.naive import linear_logprobs
from driftscope.spec import LossSpec
from tests.algebra_batches import MAX_LENGTH, B, T, random_batch

HIDDEN_SIZE, VOCABULARY = 9, 37

# What a path's relative error may exceed plain PyTorch's own by: rounding in another order, on a few dozen tokens.
EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHARE = 1.5

TERMS = {
    "bare": {},
    "kl": {"beta": 0.1},
    "kl_bias_delta": {"beta": 0.1, "kl_bias_correction": True, "delta": 1.3},
    "is_token_truncate": {"is_correction": True, "is_mode": "token_truncate"},
    "is_token_mask": {"is_correction": True, "is_mode": "token_mask", "is_cap": 1.2, "is_floor": 0.8},
    "is_sequence_mask": {"is_correction": True, "is_mode": "sequence_mask"},
    "sequence_ratio": {"importance_sampling_level": "sequence"},
    "entropy_bonus": {"entropy_coef": 0.3, "temperature": 0.7},
    "entropy_quantile": {"top_entropy_quantile": 0.55, "off_policy_threshold": 0.1},
    "head": {"logit_softcap": 3.0, "logit_scale": 0.5, "temperature": 1.3, "accumulation_steps": 4},
    "tools": {"tool_mask": True, "num_processes": 2, "steps_per_generation": 8},
}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def spec_of(loss: str, terms: str) -> LossSpec:
    """A loss type with one group of options."""
    return LossSpec(loss_type=loss, max_completion_length=MAX_LENGTH, **TERMS[terms])


@dataclass(frozen=True)
class HeadProblem:
    """Leaves of the loss (hidden (B, T, D), weight (V, D), bias (V,)) and what the loss reads beside them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    targets: torch.Tensor
    batch: TokenBatch

    def leaves(self):
        """Fresh leaves that require grad."""
        return [t.detach().clone().requires_grad_(True) for t in (self.hidden, self.weight, self.bias)]


def to_device(batch: TokenBatch, device: str) -> TokenBatch:
    """The batch with its tensors on a device."""
    moved = {k: v.to(device) for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **moved)


def head_problem(
    spec: LossSpec,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    on_policy: bool = False,
    spread: float = 0.7,
) -> HeadProblem:
    """A problem whose old, reference and sampling log-probs stand near the head's own, as in training."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, T, HIDDEN_SIZE, generator=g, dtype=torch.float64).to(dtype)
    weight = (torch.randn(vocabulary, HIDDEN_SIZE, generator=g, dtype=torch.float64) * spread).to(dtype)
    bias = torch.randn(vocabulary, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocabulary, (B, T), generator=g)
    batch = random_batch(seed, on_policy=on_policy, tools=spec.tool_mask)
    problem = HeadProblem(hidden, weight, bias, targets, batch)
    logps, _ = logprobs(problem, spec, *(t.double() for t in (hidden, weight, bias)))
    shift = logps.detach() - batch.logps_BT
    near = {k: getattr(batch, k) for k in ("old_logps_BT", "ref_logps_BT", "sampling_logps_BT")}
    batch = replace(batch, **{k: v + shift for k, v in near.items() if v is not None})
    return HeadProblem(
        hidden.to(device), weight.to(device), bias.to(device), targets.to(device), to_device(batch, device)
    )


def logprobs(problem, spec, hidden, weight, bias):
    """Log-probs and entropies (B, T) of plain PyTorch."""
    logps, entropies = linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        problem.targets.reshape(-1),
        bias=bias,
        temperature=spec.temperature,
        softcap=spec.logit_softcap,
        logit_scale=spec.logit_scale,
    )
    return logps.view(problem.targets.shape), entropies.view(problem.targets.shape)


def plain(problem: HeadProblem, spec: LossSpec, dtype: torch.dtype):
    """Loss and gradients of plain PyTorch in ``dtype``, the algebra in float64: the oracle where dtype is float64."""
    leaves = [t.detach().to(dtype).requires_grad_(True) for t in (problem.hidden, problem.weight, problem.bias)]
    logps, entropies = logprobs(problem, spec, *leaves)
    batch = replace(problem.batch, logps_BT=logps.detach(), entropies_BT=entropies.detach())
    found = coefficients(spec, batch)
    total = (logps * found.logps_BT).sum()
    if found.entropies_BT is not None:
        total = total + (entropies * found.entropies_BT).sum()
    return found.loss, [g.double() for g in torch.autograd.grad(total, leaves)]


def error(value: torch.Tensor, true: torch.Tensor) -> float:
    """|value - true| / |true|; the plain norm where the truth is zero."""
    norm = float(true.norm())
    return float((value.double() - true).norm()) / (norm if norm > 0 else 1.0)


def assert_as_exact_as_plain(problem: HeadProblem, spec: LossSpec, loss: torch.Tensor, grads) -> None:
    """Loss and every gradient are as near to the float64 truth as plain PyTorch's in the same dtype."""
    dtype = problem.hidden.dtype
    true_loss, true = plain(problem, spec, torch.float64)
    plain_loss, plain_grads = plain(problem, spec, dtype)
    epsilon = EPSILON[dtype]
    scale = max(abs(true_loss), 1.0)
    assert abs(float(loss.detach()) - true_loss) <= SHARE * abs(plain_loss - true_loss) + epsilon * scale
    for name, mine, theirs, truth in zip(("hidden", "weight", "bias"), grads, plain_grads, true, strict=True):
        bound = SHARE * error(theirs, truth) + epsilon
        assert error(mine, truth) <= bound, f"{name}: {error(mine, truth):.2e} over {bound:.2e}"
