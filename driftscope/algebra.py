"""The loss algebra: from a ``LossSpec`` and a ``TokenBatch`` to the loss and its token coefficients.

    L = (1/N) sum_bt m_bt [ o_b e_bt w_bt l_bt + beta k_bt ]
        - entropy_coef / (n accumulation_steps) sum_bt m_bt e_bt H_bt

l is the policy loss of the token (``surrogates``), w the importance sampling ratio (``importance``; inside l for
vespo), m the policy mask, o the off-policy sequence mask, e the top-entropy mask (``masks``), k the k3 KL (times the
policy ratio with ``kl_bias_correction``), H the entropy, n = sum m e, and N the normaliser (``normalizers``; the
``sequence`` and ``length_weighted`` ones are no single divisor). The token coefficients are dL/dlogp and dL/dH.
The head's terms of the spec (temperature, softcap, scale, adapter) act before the log-probs and do not enter here.

Written from the algebra and held against TRL's installed ``GRPOTrainer._compute_loss``; in float64 it is the oracle.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from driftscope.batch import Coefficients, TokenBatch
from driftscope.errors import UsageError
from driftscope.importance import applied_ratio, importance_ratio, raw_log_ratio_BT
from driftscope.masks import counts, off_policy_mask, policy_mask, require_entropies, top_entropy_mask
from driftscope.normalizers import normalize, normalizer_value
from driftscope.spec import LossSpec
from driftscope.surrogates import cispo_loss, clipped_loss, k3_kl, policy_ratio, sapo_loss, vespo_weight

__all__ = [
    "coefficients",
    "importance_ratio",
    "normalizer_value",
    "policy_mask",
    "raw_log_ratio_BT",
]

_TOKEN_FIELDS = (
    "completion_mask_BT",
    "old_logps_BT",
    "ref_logps_BT",
    "sampling_logps_BT",
    "tool_mask_BT",
    "entropies_BT",
)


def coefficients(spec: LossSpec, batch: TokenBatch, dtype: torch.dtype = torch.float64) -> Coefficients:
    """Loss of one micro-batch and its derivatives by log-probs and entropies, all computed in ``dtype``.

    The batch's tensors are detached; nothing of the caller's graph is touched. ``entropies_BT`` of the result is
    ``None`` unless ``spec.entropy_coef`` is non-zero. Works under ``torch.no_grad``.

    Raises ``UsageError`` for an input that the spec needs and the batch lacks, and for shapes that do not match.
    """
    _check_shapes(batch)
    with torch.enable_grad():
        batch = _with_leaves(spec, batch.to(dtype), batch.num_items_in_batch)
        loss = _loss(spec, batch)
        leaves = [batch.logps_BT]
        if spec.entropy_coef != 0.0:
            leaves.append(require_entropies(batch, f"entropy_coef={spec.entropy_coef}"))
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return Coefficients(
        loss=float(loss.detach()),
        logps_BT=grads[0],
        entropies_BT=grads[1] if len(grads) > 1 else None,
        normalizer=normalizer_value(spec, batch),
    )


def _loss(spec: LossSpec, batch: TokenBatch) -> Tensor:
    """The loss, a scalar that depends on the batch's log-probs and entropies by autograd."""
    mask_BT = policy_mask(spec, batch)
    advantages = batch.advantages.unsqueeze(1) if batch.advantages.dim() == 1 else batch.advantages
    entropy_mask_BT = top_entropy_mask(spec, batch, mask_BT) if spec.top_entropy_quantile < 1.0 else None
    old_BT = batch.logps_BT.detach() if batch.old_logps_BT is None else batch.old_logps_BT
    log_ratio_BT = batch.logps_BT - old_BT
    ratio = policy_ratio(spec, log_ratio_BT, mask_BT)
    is_ratio = applied_ratio(spec, batch)

    token_loss = _policy_loss(spec, batch, ratio, log_ratio_BT, mask_BT, advantages, is_ratio)
    if spec.off_policy_threshold is not None:
        token_loss = token_loss * off_policy_mask(batch, mask_BT, advantages, spec.off_policy_threshold)
    if entropy_mask_BT is not None:
        token_loss = token_loss * entropy_mask_BT
    if is_ratio is not None and spec.loss_type != "vespo":
        token_loss = token_loss * is_ratio
    if spec.beta != 0.0:
        kl_BT = k3_kl(batch.logps_BT, _require_ref(spec, batch))
        token_loss = token_loss + spec.beta * (kl_BT * ratio if spec.kl_bias_correction else kl_BT)

    loss = normalize(spec, batch, token_loss, mask_BT)
    if spec.entropy_coef != 0.0:
        loss = loss - spec.entropy_coef * _mean_entropy(spec, batch, mask_BT, entropy_mask_BT)
    return loss


def _policy_loss(
    spec: LossSpec,
    batch: TokenBatch,
    ratio: Tensor,
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    advantages: Tensor,
    is_ratio: Tensor | None,
) -> Tensor:
    """The policy loss of each token, (B, T), or (B, 1) with a sequence-level ratio."""
    if spec.loss_type == "cispo":
        return cispo_loss(spec, ratio, advantages, batch.logps_BT)
    if spec.loss_type == "sapo":
        return sapo_loss(spec, ratio, advantages)
    if spec.loss_type == "vespo":
        return -vespo_weight(spec, log_ratio_BT, mask_BT, advantages, is_ratio) * advantages * batch.logps_BT
    return clipped_loss(spec, ratio, advantages)


def _mean_entropy(spec: LossSpec, batch: TokenBatch, mask_BT: Tensor, entropy_mask_BT: Tensor | None) -> Tensor:
    """Mean entropy of the tokens that the policy term acts on, over the accumulation divisor; nats, a scalar."""
    entropies_BT = require_entropies(batch, f"entropy_coef={spec.entropy_coef}")
    acting_BT = mask_BT if entropy_mask_BT is None else mask_BT * entropy_mask_BT
    return (entropies_BT * acting_BT).sum() / counts(acting_BT.flatten()) / spec.accumulation_steps


def _with_leaves(spec: LossSpec, batch: TokenBatch, num_items: float | None) -> TokenBatch:
    """The batch with log-probs (and entropies, where the loss has an entropy bonus) as fresh autograd leaves."""
    entropies_BT = batch.entropies_BT
    if spec.entropy_coef != 0.0:
        entropies_BT = require_entropies(batch, f"entropy_coef={spec.entropy_coef}").clone().requires_grad_(True)
    return replace(
        batch,
        logps_BT=batch.logps_BT.clone().requires_grad_(True),
        entropies_BT=entropies_BT,
        num_items_in_batch=num_items,
    )


def _require_ref(spec: LossSpec, batch: TokenBatch) -> Tensor:
    if batch.ref_logps_BT is None:
        raise UsageError(
            f"beta={spec.beta} adds a KL term to the reference model, and this batch has no reference log-probs; give "
            "TokenBatch(ref_logps_BT=...) or set beta=0."
        )
    return batch.ref_logps_BT


def _check_shapes(batch: TokenBatch) -> None:
    """Refuse tensors that would broadcast by accident."""
    if batch.logps_BT.dim() != 2:
        raise UsageError(f"logps_BT has shape {tuple(batch.logps_BT.shape)}; the loss algebra works on (B, T).")
    sequences, tokens = batch.logps_BT.shape
    whole, row = (sequences, tokens), (sequences, 1)
    allowed: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(_TOKEN_FIELDS, (whole,))
    allowed["advantages"] = allowed["is_ratio"] = (whole, row, (sequences,))
    for name, shapes in allowed.items():
        value = getattr(batch, name)
        if value is not None and tuple(value.shape) not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise UsageError(
                f"{name} has shape {tuple(value.shape)}, but logps_BT has {whole}: it would broadcast or fail inside "
                f"the loss; give it as {expected}."
            )
