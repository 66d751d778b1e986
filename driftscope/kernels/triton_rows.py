"""Triton device code of the row operations: one program per row of a tile of raw logits.

A row is read in blocks of L * K columns; a thread owns K adjacent ones (16 bytes), so that the running maximum is kept
per lane of L and the sums are rescaled once in K elements. Differences to the maximum are taken before any scaling, so
large logits lose no accuracy.

Constants of every kernel: HAS_BIAS, CAPPED (softcap), SCALED (logit scale or temperature other than 1), ENTROPY
(entropies wanted, or their gradient).
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # stands for -inf, which would make NaN of inf - inf

# Policy losses that the one-pass kernel knows.
CLIPPED = tl.constexpr(0)
CISPO = tl.constexpr(1)
SAPO = tl.constexpr(2)


@triton.jit
def _tanh(x):
    """tanh to float32 accuracy: the series near 0, where the quotient cancels."""
    e = tl.exp2(-2.0 * tl.abs(x) * LOG2E)
    quotient = (1.0 - e) / (1.0 + e)
    quotient = tl.where(x < 0, -quotient, quotient)
    y = x * x
    series = x * (1.0 + y * (-0.33333333333 + y * (0.13333333333 + y * (-0.05396825397 + y * 0.02186948854))))
    return tl.where(tl.abs(x) < 0.25, series, quotient)


@triton.jit
def _logits(x_ptr, bias_ptr, offsets, mask, scale, cap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr,
            SCALED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """z of some columns, and tanh of the softcap (z again where there is none); -inf becomes LOWEST, NaN stays.

    ``scale``: logit_scale / softcap with a softcap, else logit_scale / temperature; ``cap``: softcap / temperature.
    """
    if MASKED:
        z = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        z = tl.load(x_ptr + offsets).to(tl.float32)
    if HAS_BIAS:
        if MASKED:
            z += tl.load(bias_ptr + offsets, mask=mask, other=0.0)
        else:
            z += tl.load(bias_ptr + offsets)
    tanh = z
    if CAPPED:
        tanh = _tanh(z * scale)
        z = tanh * cap
    elif SCALED:
        z = z * scale
    z = tl.where(z < LOWEST, LOWEST, z)
    if MASKED:
        z = tl.where(mask, z, LOWEST)
    return z, tanh


@triton.jit
def _fold(m, s, xs, z, ENTROPY: tl.constexpr):
    """Fold z (L, K) into the running maximum m, s = sum exp(z - m), and xs = sum exp(z - m) (z - m), each (L,)."""
    peak = tl.maximum(m, tl.max(z, axis=1))
    drop = m - peak
    rescale = tl.exp2(drop * LOG2E)
    d = z - peak[:, None]
    e = tl.exp2(d * LOG2E)
    if ENTROPY:
        xs = (xs + s * drop) * rescale + tl.sum(e * d, axis=1)
    s = s * rescale + tl.sum(e, axis=1)
    return peak, s, xs


@triton.jit
def _row_stats(x_ptr, bias_ptr, target, V, scale, cap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr,
               SCALED: tl.constexpr, ENTROPY: tl.constexpr, L: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Log-prob of the target, entropy, maximum and log of the sum of exp(z - maximum) of one row."""
    columns = tl.arange(0, L)[:, None] * K + tl.arange(0, K)[None, :]
    m = tl.full((L,), LOWEST, tl.float32)
    s = tl.zeros((L,), tl.float32)
    xs = tl.zeros((L,), tl.float32)
    whole = V // (L * K) * (L * K)
    for start in range(0, whole, L * K):
        z, _ = _logits(x_ptr, bias_ptr, start + columns, columns, scale, cap, HAS_BIAS, CAPPED, SCALED, False)
        m, s, xs = _fold(m, s, xs, z, ENTROPY)
    if whole < V:
        at = whole + columns
        z, _ = _logits(x_ptr, bias_ptr, at, at < V, scale, cap, HAS_BIAS, CAPPED, SCALED, True)
        m, s, xs = _fold(m, s, xs, z, ENTROPY)
    peak = tl.max(m, axis=0)
    drop = m - peak
    rescale = tl.exp2(drop * LOG2E)
    total = tl.sum(s * rescale, axis=0)
    logsum = tl.log2(total) * LN2
    entropy = logsum
    if ENTROPY:
        entropy = logsum - tl.sum((xs + s * drop) * rescale, axis=0) / total
    # The target as a block of one, which goes the way of all other columns.
    at = target + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
    z, _ = _logits(x_ptr, bias_ptr, at, at, scale, cap, HAS_BIAS, CAPPED, SCALED, False)
    logp = tl.sum(tl.sum(z, axis=1), axis=0) - peak - logsum
    return logp, entropy, peak, logsum


@triton.jit
def _gradient_block(x_ptr, bias_ptr, at, mask, target, c, e, peak, logsum, entropy, scale, cap,
                    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr,
                    MASKED: tl.constexpr):  # fmt: skip
    """Replace the raw logits of some columns by the gradient; c and e hold the constant part of dz/draw."""
    z, tanh = _logits(x_ptr, bias_ptr, at, mask, scale, cap, HAS_BIAS, CAPPED, SCALED, MASKED)
    d = z - peak
    p = tl.exp2(d * LOG2E - logsum * LOG2E)
    grad = tl.where(at == target, c, 0.0) - c * p
    if ENTROPY:
        grad -= e * p * (d - logsum + entropy)
    if CAPPED:
        grad *= 1.0 - tanh * tanh
    grad = grad.to(x_ptr.dtype.element_ty)
    if MASKED:
        tl.store(x_ptr + at, grad, mask=mask, eviction_policy="evict_first")
    else:
        tl.store(x_ptr + at, grad, eviction_policy="evict_first")


@triton.jit
def _row_gradient(x_ptr, bias_ptr, target, c, e, peak, logsum, entropy, V, scale, cap, HAS_BIAS: tl.constexpr,
                  CAPPED: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr, L: tl.constexpr,
                  K: tl.constexpr):  # fmt: skip
    """Replace one row of raw logits by its gradient, from the last column back: the end of the row was read last."""
    columns = tl.arange(0, L)[:, None] * K + tl.arange(0, K)[None, :]
    blocks = V // (L * K)
    whole = blocks * (L * K)
    if whole < V:
        at = whole + columns
        _gradient_block(x_ptr, bias_ptr, at, at < V, target, c, e, peak, logsum, entropy, scale, cap, HAS_BIAS, CAPPED,
                        SCALED, ENTROPY, True)  # fmt: skip
    for block in range(blocks):
        at = (blocks - 1 - block) * (L * K) + columns
        _gradient_block(x_ptr, bias_ptr, at, at, target, c, e, peak, logsum, entropy, scale, cap, HAS_BIAS, CAPPED,
                        SCALED, ENTROPY, False)  # fmt: skip


@triton.jit
def stats_kernel(x_ptr, stride, bias_ptr, targets_ptr, logps_ptr, entropies_ptr, peaks_ptr, logsums_ptr, V, scale, cap,
                 HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr,
                 L: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Statistics of every row; grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logp, entropy, peak, logsum = _row_stats(x_ptr + row * stride, bias_ptr, target, V, scale, cap, HAS_BIAS, CAPPED,
                                             SCALED, ENTROPY, L, K)  # fmt: skip
    tl.store(logps_ptr + row, logp)
    tl.store(entropies_ptr + row, entropy)
    tl.store(peaks_ptr + row, peak)
    tl.store(logsums_ptr + row, logsum)


@triton.jit
def gradient_kernel(x_ptr, stride, bias_ptr, targets_ptr, c_ptr, e_ptr, entropies_ptr, peaks_ptr, logsums_ptr, V,
                    scale, cap, slope, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
                    ENTROPY: tl.constexpr, L: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Gradient of sum (c logp + e H) in place of the raw logits; grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    c = tl.load(c_ptr + row) * slope
    e = c
    if ENTROPY:
        e = tl.load(e_ptr + row) * slope
    _row_gradient(x_ptr + row * stride, bias_ptr, target, c, e, tl.load(peaks_ptr + row), tl.load(logsums_ptr + row),
                  tl.load(entropies_ptr + row), V, scale, cap, HAS_BIAS, CAPPED, SCALED, ENTROPY, L, K)  # fmt: skip


@triton.jit
def stats_gradient_kernel(x_ptr, stride, bias_ptr, targets_ptr, logps_ptr, entropies_ptr, peaks_ptr, logsums_ptr, V,
                          scale, cap, slope, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
                          L: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Statistics of every row, and the gradient of sum logp in place of the raw logits, in one go; grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logp, entropy, peak, logsum = _row_stats(x_ptr + row * stride, bias_ptr, target, V, scale, cap, HAS_BIAS, CAPPED,
                                             SCALED, True, L, K)  # fmt: skip
    tl.store(logps_ptr + row, logp)
    tl.store(entropies_ptr + row, entropy)
    tl.store(peaks_ptr + row, peak)
    tl.store(logsums_ptr + row, logsum)
    # Every thread of the row must have read its logits before they are replaced.
    tl.debug_barrier()
    _row_gradient(x_ptr + row * stride, bias_ptr, target, slope, slope, peak, logsum, entropy, V, scale, cap, HAS_BIAS,
                  CAPPED, SCALED, False, L, K)  # fmt: skip


@triton.jit
def _policy_term(logp, ratio, advantage, low, high, delta, tau_pos, tau_neg, KIND: tl.constexpr,
                 HAS_DELTA: tl.constexpr):  # fmt: skip
    """Policy loss of a token and its derivative by the log-prob (``driftscope.surrogates``)."""
    if KIND == CISPO:
        weight = tl.where(ratio > high, high, ratio)
        value = -weight * advantage * logp
        slope = -weight * advantage
    elif KIND == SAPO:
        tau = tl.where(advantage > 0, tau_pos, tau_neg)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        value = -gate * 4.0 / tau * advantage
        slope = -gate * (1.0 - gate) * 4.0 * advantage * ratio
    else:
        bounded = ratio * advantage
        d_bounded = advantage
        if HAS_DELTA:
            bounded = tl.where(ratio > delta, delta, ratio) * advantage
            d_bounded = tl.where(ratio > delta, 0.0, advantage)
        clipped = tl.where(ratio > high, high, tl.where(ratio < low, low, ratio)) * advantage
        d_clipped = tl.where((ratio > high) | (ratio < low), 0.0, advantage)
        tie = 0.5 * (d_bounded + d_clipped)
        value = -tl.where(bounded > clipped, clipped, bounded)
        slope = -ratio * tl.where(bounded < clipped, d_bounded, tl.where(bounded > clipped, d_clipped, tie))
    return value, slope


@triton.jit
def loss_kernel(x_ptr, stride, bias_ptr, targets_ptr, logps_ptr, entropies_ptr, peaks_ptr, logsums_ptr, losses_ptr,
                c_ptr, advantages_ptr, policy_weights_ptr, old_ptr, ref_ptr, kl_weights_ptr, entropy_weights_ptr, V,
                scale, cap, slope, low, high, delta, tau_pos, tau_neg, beta, HAS_BIAS: tl.constexpr,
                CAPPED: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr, ENTROPY_BONUS: tl.constexpr,
                KIND: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_OLD: tl.constexpr, HAS_KL: tl.constexpr,
                KL_BIAS: tl.constexpr, L: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Statistics, token loss, coefficient, and the gradient in place of the raw logits, in one go; grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logp, entropy, peak, logsum = _row_stats(x_ptr + row * stride, bias_ptr, target, V, scale, cap, HAS_BIAS, CAPPED,
                                             SCALED, ENTROPY, L, K)  # fmt: skip
    tl.store(logps_ptr + row, logp)
    tl.store(entropies_ptr + row, entropy)
    tl.store(peaks_ptr + row, peak)
    tl.store(logsums_ptr + row, logsum)

    ratio = tl.exp(logp - logp)  # 1, and NaN for NaN
    if HAS_OLD:
        ratio = tl.exp(logp - tl.load(old_ptr + row))
    value, c = _policy_term(logp, ratio, tl.load(advantages_ptr + row), low, high, delta, tau_pos, tau_neg, KIND,
                            HAS_DELTA)  # fmt: skip
    weight = tl.load(policy_weights_ptr + row)
    value *= weight
    c *= weight
    if HAS_KL:
        weight = tl.load(kl_weights_ptr + row) * beta
        log_ratio = tl.load(ref_ptr + row) - logp
        kl = tl.exp(log_ratio) - log_ratio - 1.0
        d_kl = 1.0 - tl.exp(log_ratio)
        if KL_BIAS:
            d_kl = ratio * (d_kl + kl)
            kl *= ratio
        value += weight * kl
        c += weight * d_kl
    e = c
    if ENTROPY_BONUS:
        e = -tl.load(entropy_weights_ptr + row)
        value += e * entropy
        e *= slope
    tl.store(losses_ptr + row, value)
    tl.store(c_ptr + row, c)
    # Every thread of the row must have read its logits before they are replaced.
    tl.debug_barrier()
    _row_gradient(x_ptr + row * stride, bias_ptr, target, c * slope, e, peak, logsum, entropy, V, scale, cap, HAS_BIAS,
                  CAPPED, SCALED, ENTROPY_BONUS, L, K)  # fmt: skip


@triton.jit
def scaled_copy_kernel(x_ptr, factor_ptr, y_ptr, total, BLOCK: tl.constexpr):
    """y = factor * x in y's dtype; grid (ceil(total / BLOCK),)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    x = tl.load(x_ptr + at, mask=mask).to(tl.float32) * tl.load(factor_ptr)
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=mask)
