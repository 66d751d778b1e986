"""The part of the loss algebra that needs only a token's own log-prob, as vectors: what makes one pass possible.

    L = sum_n [ w_n l(logp_n) + beta u_n k(logp_n) (r_n with kl_bias_correction) - e_n H_n ]

l is the policy loss (``driftscope.surrogates``) and k the k3 KL. The weights hold all that does not depend on the
policy's present log-probs: mask, importance sampling ratio, normaliser. They are derivatives of
``driftscope.normalizers.normalize``, so no normaliser is written down twice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.importance import applied_ratio
from driftscope.masks import counts, policy_mask
from driftscope.normalizers import normalize
from driftscope.spec import LossSpec
from driftscope.surrogates import cispo_loss, clipped_loss, k3_kl, sapo_loss

TOKEN_LOCAL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """Vectors over tokens (N,), and the spec that says how they combine."""

    spec: LossSpec
    advantages: Tensor
    policy_weights: Tensor  # w
    old_logps: Tensor | None  # None: on-policy
    ref_logps: Tensor | None = None
    kl_weights: Tensor | None = None  # u, where beta != 0
    entropy_weights: Tensor | None = None  # e, where entropy_coef != 0

    def take(self, index: Tensor | slice) -> TokenTerms:
        """The terms of some tokens."""
        changes: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changes[field.name] = value[index]
        return replace(self, **changes)

    @property
    def may_clip(self) -> bool:
        """Whether a token's coefficient can turn out zero only after its log-prob is known."""
        clips = self.spec.loss_type not in ("cispo", "sapo")
        return clips and self.old_logps is not None and self.kl_weights is None and self.entropy_weights is None


def is_token_local(spec: LossSpec, batch: TokenBatch) -> bool:
    """Whether every token's coefficient depends on the policy only through that token's own log-prob."""
    own_ratio = (
        spec.is_correction and batch.is_ratio is None and batch.old_logps_BT is None
    )  # a ratio of the present log-probs to the sampling engine's
    return (
        spec.loss_type in TOKEN_LOCAL_LOSSES
        and spec.importance_sampling_level == "token"
        and spec.off_policy_threshold is None
        and spec.top_entropy_quantile >= 1.0
        and spec.effective_normalizer != "length_weighted"  # counts padding too
        and not own_ratio
    )


def active_tokens(spec: LossSpec, batch: TokenBatch) -> Tensor:
    """Tokens whose coefficient is not known to be zero before their log-prob is, (N,) boolean. NaN counts as active.

    Few operations, so that the first product can start early.
    """
    active_BT = policy_mask(spec, batch) != 0
    if spec.beta != 0.0 or spec.entropy_coef != 0.0:
        return active_BT.reshape(-1)
    advantages = batch.advantages.unsqueeze(1) if batch.advantages.dim() == 1 else batch.advantages
    active_BT = active_BT & (advantages != 0)
    is_ratio = applied_ratio(spec, batch)
    if is_ratio is not None:
        active_BT = active_BT & (is_ratio != 0)
    return active_BT.reshape(-1)


def token_terms(spec: LossSpec, batch: TokenBatch) -> TokenTerms:
    """The terms of a whole micro-batch, flattened to (B * T,), in the dtype of ``batch``'s tensors.

    ``batch`` is detached and of one float dtype (``TokenBatch.to``); its ``logps_BT`` gives the shape only.
    """
    mask_BT = policy_mask(spec, batch)
    with torch.enable_grad():
        ones = torch.ones_like(batch.logps_BT, requires_grad=True)
        (weights_BT,) = torch.autograd.grad(normalize(spec, batch, ones, mask_BT), ones)
    is_ratio = applied_ratio(spec, batch)
    advantages = batch.advantages.unsqueeze(1) if batch.advantages.dim() == 1 else batch.advantages

    def flat(value: Tensor) -> Tensor:
        return value.expand_as(mask_BT).reshape(-1).contiguous()

    entropy_weights = None
    if spec.entropy_coef != 0.0:
        entropy_weights = mask_BT * (spec.entropy_coef / counts(mask_BT.flatten()) / spec.accumulation_steps)
    if spec.beta != 0.0 and batch.ref_logps_BT is None:
        raise UsageError(
            f"beta={spec.beta} adds a KL term to the reference model, and this batch has no reference log-probs; give "
            "TokenBatch(ref_logps_BT=...) or set beta=0."
        )
    return TokenTerms(
        spec=spec,
        advantages=flat(advantages),
        policy_weights=flat(weights_BT if is_ratio is None else weights_BT * is_ratio),
        old_logps=None if batch.old_logps_BT is None else flat(batch.old_logps_BT),
        ref_logps=flat(batch.ref_logps_BT) if spec.beta != 0.0 and batch.ref_logps_BT is not None else None,
        kl_weights=flat(weights_BT) if spec.beta != 0.0 else None,
        entropy_weights=None if entropy_weights is None else flat(entropy_weights),
    )


def token_losses(terms: TokenTerms, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of each token, and its derivatives by the token's log-prob and entropy (or ``None``), all (N,)."""
    spec = terms.spec
    with torch.enable_grad():
        leaf = logps.detach().requires_grad_(True)
        ratio = torch.exp(leaf - (leaf.detach() if terms.old_logps is None else terms.old_logps))
        if spec.loss_type == "cispo":
            policy = cispo_loss(spec, ratio, terms.advantages, leaf)
        elif spec.loss_type == "sapo":
            policy = sapo_loss(spec, ratio, terms.advantages)
        else:
            policy = clipped_loss(spec, ratio, terms.advantages)
        losses = terms.policy_weights * policy
        if terms.kl_weights is not None and terms.ref_logps is not None:
            kl = k3_kl(leaf, terms.ref_logps)
            losses = losses + spec.beta * terms.kl_weights * (kl * ratio if spec.kl_bias_correction else kl)
        (c,) = torch.autograd.grad(losses.sum(), leaf)
    losses = losses.detach()
    if terms.entropy_weights is None:
        return losses, c, None
    return losses - terms.entropy_weights * entropies, c, -terms.entropy_weights
