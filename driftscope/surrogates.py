"""Per-token policy losses of the GRPO family, and the KL estimate.

With r the ratio of the trained to the old policy, A the advantage and logp the log-prob of the sampled token:

    grpo, bnpo, dr_grpo, dapo, luspo   -min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)
    cispo                              -sg[min(r, eps_high)] A logp
    sapo                               -(4 / tau) sigmoid(tau (r - 1)) A,  tau by the sign of A
    vespo                              -sg[phi(w)] A logp,  phi(w) = exp(lambda + k log w - lambda w)

sg[.] stops the gradient. Each is (B, T), or (B, 1) with a sequence-level ratio. Sources: DAPO (arXiv:2503.14476), GSPO
(arXiv:2507.18071), CISPO (arXiv:2506.13585), SAPO (arXiv:2511.20347), VESPO (arXiv:2602.10693),
INTELLECT-2 for delta (arXiv:2505.07291), and TRL ``GRPOTrainer._compute_loss``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftscope.masks import counts
from driftscope.spec import LossSpec

# VESPO's bounds on log ratios, nats.
_LOG_W_MIN = math.log(1e-8)
_LOG_W_MAX = 20.0


def policy_ratio(spec: LossSpec, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Ratio of the trained to the old policy: (B, T), or (B, 1) for the geometric mean over a sequence (GSPO)."""
    if spec.importance_sampling_level == "token":
        return torch.exp(log_ratio_BT)
    return torch.exp((log_ratio_BT * mask_BT).sum(-1, keepdim=True) / counts(mask_BT, keepdim=True))


def clipped_loss(spec: LossSpec, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Clipped surrogate, two-sided where ``delta`` is set."""
    clipped = ratio.clamp(1.0 - spec.epsilon_low, 1.0 + spec.epsilon_high)
    bounded = ratio if spec.delta is None else ratio.clamp(max=spec.delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def cispo_loss(spec: LossSpec, ratio: Tensor, advantages: Tensor, logps_BT: Tensor) -> Tensor:
    """Policy gradient weighted by a capped, detached ratio; here ``epsilon_high`` is the cap itself."""
    return -ratio.clamp(max=spec.epsilon_high).detach() * advantages * logps_BT


def sapo_loss(spec: LossSpec, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Sigmoid gate in place of the clip; its temperature depends on the sign of the advantage."""
    temperature = torch.where(
        advantages > 0,
        advantages.new_tensor(spec.sapo_temperature_pos),
        advantages.new_tensor(spec.sapo_temperature_neg),
    )
    return -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * advantages


def vespo_weight(
    spec: LossSpec, log_ratio_BT: Tensor, mask_BT: Tensor, advantages: Tensor, is_ratio: Tensor | None
) -> Tensor:
    """Detached weight phi(w) of each sequence, (B, 1), or (B, T) with per-token advantages; phi(1) = 1.

    ``w`` is the sequence's ratio of the trained to the sampling policy: the importance sampling correction enters here
    and nowhere else. The sum over its log runs over all T positions, as in TRL, so positions that are not trained on
    must carry a ratio of 1.
    """
    log_w = (log_ratio_BT.detach().clamp(-_LOG_W_MAX, _LOG_W_MAX) * mask_BT).sum(-1, keepdim=True)
    if is_ratio is not None:
        log_w = log_w + torch.log(is_ratio).clamp(_LOG_W_MIN, _LOG_W_MAX).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LOG_W_MIN, _LOG_W_MAX)
    nonnegative = advantages >= 0
    shape = torch.where(nonnegative, log_w.new_tensor(spec.vespo_k_pos), log_w.new_tensor(spec.vespo_k_neg))
    rate = torch.where(nonnegative, log_w.new_tensor(spec.vespo_lambda_pos), log_w.new_tensor(spec.vespo_lambda_neg))
    rate = rate.clamp(min=1e-4)
    return torch.exp(rate + shape * log_w - rate * torch.exp(log_w)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def k3_kl(logps_BT: Tensor, ref_logps_BT: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) of each token, nats, (B, T): exp(d) - d - 1 with d = log(ref / policy).

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio_BT = ref_logps_BT - logps_BT
    return torch.exp(log_ratio_BT) - log_ratio_BT - 1.0
