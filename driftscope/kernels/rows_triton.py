"""Launches the Triton row kernels; same interface as ``rows_torch``."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor

from driftscope.kernels import triton_rows
from driftscope.kernels.head import HeadTransform
from driftscope.kernels.row_stats import RowStats
from driftscope.kernels.token_terms import TokenTerms

LOAD_BYTES = 16  # of one thread's load
BLOCK_COLUMNS = 16384  # columns of a row in flight at once
WARPS = 16
COPY_BLOCK = 4096
KINDS = {"cispo": triton_rows.CISPO.value, "sapo": triton_rows.SAPO.value}


def _shape(tile: Tensor) -> dict[str, int]:
    """Block shape and warps for a tile."""
    lane = LOAD_BYTES // tile.element_size()
    columns = min(BLOCK_COLUMNS, max(int(triton.next_power_of_2(tile.shape[1])) // 2, 32 * lane))
    warps = max(1, min(WARPS, columns // (32 * lane)))
    if os.environ.get("TRITON_INTERPRET") == "1":
        columns, warps = min(columns, 512), 1
    return {"L": columns // lane, "K": lane, "num_warps": warps}


def _head(tile: Tensor, bias: Tensor | None, transform: HeadTransform) -> tuple[dict[str, Any], dict[str, float]]:
    """Constants and numbers of the transform, and the constant part of dz/draw."""
    slope = transform.logit_scale / transform.temperature
    capped = transform.softcap is not None
    flags = {"HAS_BIAS": bias is not None, "CAPPED": capped, "SCALED": slope != 1.0, **_shape(tile)}
    if transform.softcap is None:
        numbers = {"scale": slope, "cap": 1.0}
    else:
        numbers = {
            "scale": transform.logit_scale / transform.softcap,
            "cap": transform.softcap / transform.temperature,
        }
    return flags, {**numbers, "slope": slope}


def stats(tile: Tensor, bias: Tensor | None, targets: Tensor, transform: HeadTransform, out: RowStats) -> None:
    """Fill ``out`` from a tile of raw logits (n, V), rows ``tile.stride(0)`` apart."""
    flags, numbers = _head(tile, bias, transform)
    triton_rows.stats_kernel[(tile.shape[0],)](
        tile, tile.stride(0), _or(bias, out.logps), targets, out.logps, out.entropies, out.peaks, out.logsums,
        tile.shape[1], float(numbers["scale"]), float(numbers["cap"]), ENTROPY=True, **flags,
    )  # fmt: skip


def gradient_(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    stats: RowStats,
    grad_logps: Tensor,
    grad_entropies: Tensor | None,
) -> None:
    """Overwrite raw logits (n, V) by the gradient of sum_n (c logp + e H)."""
    flags, numbers = _head(tile, bias, transform)
    triton_rows.gradient_kernel[(tile.shape[0],)](
        tile, tile.stride(0), _or(bias, grad_logps), targets, grad_logps, _or(grad_entropies, grad_logps),
        stats.entropies, stats.peaks, stats.logsums, tile.shape[1], float(numbers["scale"]), float(numbers["cap"]),
        float(numbers["slope"]), ENTROPY=grad_entropies is not None, **flags,
    )  # fmt: skip


def stats_gradient_(
    tile: Tensor, bias: Tensor | None, targets: Tensor, transform: HeadTransform, out: RowStats
) -> None:
    """Fill ``out``, and overwrite raw logits (n, V) by the gradient of sum_n logp; the second look hits the cache."""
    flags, numbers = _head(tile, bias, transform)
    triton_rows.stats_gradient_kernel[(tile.shape[0],)](
        tile, tile.stride(0), _or(bias, out.logps), targets, out.logps, out.entropies, out.peaks, out.logsums,
        tile.shape[1], float(numbers["scale"]), float(numbers["cap"]), float(numbers["slope"]), **flags,
    )  # fmt: skip


def loss_(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    terms: TokenTerms,
    out: RowStats,
    losses: Tensor,
    grad_logps: Tensor,
    scale: float,
) -> None:
    """Statistics, token losses and coefficients, and the gradient times ``scale`` in place of the logits."""
    spec = terms.spec
    flags, numbers = _head(tile, bias, transform)
    clipped = spec.loss_type not in KINDS
    triton_rows.loss_kernel[(tile.shape[0],)](
        tile, tile.stride(0), _or(bias, losses), targets, out.logps, out.entropies, out.peaks, out.logsums, losses,
        grad_logps, terms.advantages, terms.policy_weights, _or(terms.old_logps, losses), _or(terms.ref_logps, losses),
        _or(terms.kl_weights, losses), _or(terms.entropy_weights, losses), tile.shape[1], float(numbers["scale"]),
        float(numbers["cap"]), float(numbers["slope"] * scale), float(1.0 - spec.epsilon_low),
        float(1.0 + spec.epsilon_high if clipped else spec.epsilon_high), float(spec.delta or 0.0),
        float(spec.sapo_temperature_pos), float(spec.sapo_temperature_neg), float(spec.beta), ENTROPY=True,
        ENTROPY_BONUS=terms.entropy_weights is not None, KIND=KINDS.get(spec.loss_type, triton_rows.CLIPPED.value),
        HAS_DELTA=spec.delta is not None, HAS_OLD=terms.old_logps is not None, HAS_KL=terms.kl_weights is not None,
        KL_BIAS=spec.kl_bias_correction, **flags,
    )  # fmt: skip


def scaled_copy(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``factor * tensor`` in ``dtype``; ``tensor`` contiguous, ``factor`` a scalar tensor on the same device."""
    out = torch.empty_like(tensor, dtype=dtype)
    grid = (triton.cdiv(tensor.numel(), COPY_BLOCK),)
    if tensor.numel():
        triton_rows.scaled_copy_kernel[grid](
            tensor, factor.to(torch.float32), out, tensor.numel(), BLOCK=COPY_BLOCK, num_warps=8
        )
    return out


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor, or one that a kernel gets and does not read."""
    return stand_in if tensor is None else tensor
