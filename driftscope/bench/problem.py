"""One benchmark problem: inputs of a GRPO loss on a linear head, and its gradients in float32 as the truth.

Shapes: B sequences, T tokens, N = B * T, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from driftscope.batch import TokenBatch
from driftscope.spec import LossSpec

LOGIT_SPREAD = 3.0  # standard deviation of the logits
TOKENS = 1024  # of a sequence
PADDING = 0.5  # of a ragged batch's positions
SILENT = 0.4  # of a ragged batch's tokens have a zero advantage
ROWS = 512  # of a tile of the truth


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: sizes, whether the head is trained, and how the batch is filled."""

    rows: int  # N
    hidden_size: int  # D
    vocabulary: int  # V
    trainable: bool
    ragged: bool = False

    @property
    def name(self) -> str:
        """A key for tables: N-D-V-head-batch."""
        head = "trainable" if self.trainable else "frozen"
        return f"{self.rows}-{self.hidden_size}-{self.vocabulary}-{head}-{'ragged' if self.ragged else 'dense'}"

    @property
    def gemms(self) -> int:
        """Products of 2 N D V operations that one pass needs."""
        return 3 if self.trainable else 2


@dataclass(frozen=True)
class Truth:
    """Loss and gradients in float32."""

    loss: float
    hidden_ND: Tensor
    weight_VD: Tensor | None


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in ``dtype``; the loss is DAPO, on-policy, with a token-level importance ratio."""

    case: Case
    hidden_ND: Tensor
    weight_VD: Tensor
    targets_BT: Tensor
    batch: TokenBatch
    spec: LossSpec
    active_rows: int  # rows with a gradient
    scored_rows: int  # rows that are no padding

    @property
    def gemm_operations(self) -> float:
        """Floating-point operations of the products that cannot be avoided: forward, and backward of active rows.

        Log-probs are wanted of every row that is no padding.
        """
        size = 2.0 * self.case.hidden_size * self.case.vocabulary
        return size * (self.scored_rows + (self.case.gemms - 1) * self.active_rows)


def make_problem(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Random hidden states, weight and advantages; targets sampled from the model itself."""
    gen = torch.Generator(device=device).manual_seed(seed)
    tokens = min(TOKENS, case.rows)
    sequences = case.rows // tokens
    if sequences * tokens != case.rows:
        raise ValueError(f"{case.rows} rows do not divide into sequences of {tokens} tokens")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=gen)

    hidden = normal(case.rows, case.hidden_size).to(dtype)
    weight = (normal(case.vocabulary, case.hidden_size) * (LOGIT_SPREAD / math.sqrt(case.hidden_size))).to(dtype)
    targets = torch.empty(case.rows, dtype=torch.long, device=device)
    for start in range(0, case.rows, ROWS):
        part = slice(start, start + ROWS)
        logits = (hidden[part] @ weight.t()).float()
        noise = torch.rand(logits.shape, device=device, generator=gen)
        targets[part] = (logits - torch.log(-torch.log(noise))).argmax(-1)
    mask_BT = torch.ones(sequences, tokens, device=device)
    advantages = normal(sequences)
    if case.ragged:
        lengths = _lengths(sequences, tokens)
        mask_BT = (torch.arange(tokens)[None] < lengths[:, None]).float().to(device)
        advantages[_silent(lengths).to(device)] = 0.0
    batch = TokenBatch(
        logps_BT=torch.zeros(sequences, tokens, device=device),
        completion_mask_BT=mask_BT,
        advantages=advantages,
        is_ratio=torch.rand(sequences, tokens, device=device, generator=gen) * 1.5,
        num_items_in_batch=float(mask_BT.sum()),
    )
    spec = LossSpec(loss_type="dapo", is_correction=True, is_mode="token_truncate")
    active = int((mask_BT * (advantages != 0)[:, None]).sum())
    return Problem(case, hidden, weight, targets.view(sequences, tokens), batch, spec, active, int(mask_BT.sum()))


def policy_loss(problem: Problem, logps: Tensor) -> Tensor:
    """The problem's loss as plain tensor code on log-probs (N,) or (B, T): what the peers put on their log-probs."""
    batch, spec = problem.batch, problem.spec
    logps_BT = logps.view(batch.completion_mask_BT.shape)
    ratio = torch.exp(logps_BT - logps_BT.detach())
    clipped = ratio.clamp(1.0 - spec.epsilon_low, 1.0 + spec.epsilon_high)
    advantages_B1 = batch.advantages[:, None]
    assert batch.is_ratio is not None
    assert batch.num_items_in_batch is not None
    token_BT = -torch.minimum(ratio * advantages_B1, clipped * advantages_B1) * batch.is_ratio
    return (token_BT * batch.completion_mask_BT).sum() / batch.num_items_in_batch


def coefficients_N(problem: Problem) -> Tensor:
    """dL/dlogp of every row, (N,): on-policy, so it does not depend on the log-probs."""
    batch = problem.batch
    assert batch.is_ratio is not None
    assert batch.num_items_in_batch is not None
    c_BT = -batch.advantages[:, None] * batch.is_ratio * batch.completion_mask_BT / batch.num_items_in_batch
    return c_BT.reshape(-1)


def truth(problem: Problem) -> Truth:
    """The gradients with every product and sum in float32 (no TF32)."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        c_N = coefficients_N(problem).float()
        weight = problem.weight_VD.float()
        hidden_grad = torch.zeros_like(problem.hidden_ND, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight) if problem.case.trainable else None
        rows = c_N.nonzero().squeeze(1)
        for part in rows.split(ROWS):
            hidden = problem.hidden_ND[part].float()
            grad = -(hidden @ weight.t()).softmax(-1) * c_N[part, None]
            grad.scatter_add_(1, problem.targets_BT.reshape(-1)[part, None], c_N[part, None])
            hidden_grad[part] = grad @ weight
            if weight_grad is not None:
                weight_grad.addmm_(grad.t(), hidden)
        return Truth(float(c_N.double().sum()), hidden_grad, weight_grad)
    finally:
        torch.set_float32_matmul_precision(precision)


def _lengths(sequences: int, tokens: int) -> Tensor:
    """Lengths spread evenly from short to long, in mixed order, that leave ``PADDING`` of the positions empty."""
    steps = (torch.arange(sequences, dtype=torch.float64) + 0.5) / sequences
    lengths = (2.0 * (1.0 - PADDING) * steps * tokens).round().clamp(1, tokens).long()
    return lengths[torch.randperm(sequences, generator=torch.Generator().manual_seed(1))]


def _silent(lengths: Tensor) -> Tensor:
    """Sequences (indices) that hold about ``SILENT`` of the tokens, taken longest first where they still fit."""
    left = SILENT * float(lengths.sum())
    chosen = []
    for index in torch.argsort(lengths, descending=True).tolist():
        if lengths[index] <= left:
            chosen.append(index)
            left -= float(lengths[index])
    return torch.tensor(chosen, dtype=torch.long)
