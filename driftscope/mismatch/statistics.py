"""The one pass over a batch's log-probs that yields every sum of a mismatch, without a synchronisation.

B sequences, T completion tokens, N = B T. d = trainer log-prob - engine log-prob, w = exp(d). w - 1 is summed as
``expm1(d)``, so that the moments of ratios within 1e-7 of 1 keep their digits. Everything is 0 where a token does not
count, so that most sums need no mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.mismatch.binned import binned_sums
from driftscope.mismatch.distributions import distributions
from driftscope.mismatch.layout import LOG_LIMIT, VALUE_LIMIT
from driftscope.mismatch.sums import AppliedLevel, MismatchSums


@torch.no_grad()
def measure_mismatch(
    trainer_logps_BT: Tensor,
    sampling_logps_BT: Tensor,
    mask_BT: Tensor,
    *,
    applied: Tensor | None = None,
    applied_level: AppliedLevel | None = None,
    cap: float | None = None,
    floor: float | None = None,
) -> MismatchSums:
    """All sums of one batch, in one flat float64 tensor on the log-probs' device. Reads nothing back.

    trainer_logps_BT: old log-probs, (B, T). sampling_logps_BT: as the engine returned them, (B, T), NaN where it gave
    none. mask_BT: (B, T), nonzero at the tokens that are trained on. applied: the importance sampling ratio as the
    loss multiplies it, (B, T) or (B, 1); applied_level: whose ratio it is, ``sequence`` for (B, 1) and ``token`` for
    (B, T) unless named. cap, floor: its bounds. Tokens whose difference is not finite are counted and left out; so
    are applied weights that are negative or not finite.

    Raises ``UsageError`` for shapes or bounds that do not fit.
    """
    _check_shapes(trainer_logps_BT, sampling_logps_BT, mask_BT, applied)
    log_cap, log_floor = _log_bound("cap", cap), _log_bound("floor", floor)
    device = trainer_logps_BT.device
    trainer, engine = trainer_logps_BT.detach().double(), sampling_logps_BT.detach().to(device, torch.float64)
    inside = mask_BT.detach().to(device) != 0
    unscored = inside & torch.isnan(engine)
    d = trainer - engine
    used = inside & torch.isfinite(d)
    # Values no float32 holds squared or summed are cut off: infinity in one token must not reach a sum.
    d, trainer, engine = (torch.where(used, x, 0.0).clamp(-VALUE_LIMIT, VALUE_LIMIT) for x in (d, trainer, engine))
    lengths = used.sum(-1)
    level = applied_level if applied is not None else None
    if applied is not None and level is None:
        level = "token" if applied.shape[-1] == d.shape[-1] else "sequence"

    ratio_sums, ratio_bounds = distributions(d, used, lengths, applied, level, log_cap, log_floor)
    token, token_bounds = _token_sums(d, trainer, engine, used, inside, unscored)
    sequence = _sequence_sums(d, trainer, engine, inside, lengths)
    packed = torch.cat([ratio_sums, token, sequence, binned_sums(d, engine, used, inside), ratio_bounds, token_bounds])
    return MismatchSums(packed, cap, floor, level)


def _check_shapes(trainer: Tensor, sampling: Tensor, mask: Tensor, applied: Tensor | None) -> None:
    shapes = [tuple(x.shape) for x in (trainer, sampling, mask)]
    if len(set(shapes)) != 1 or trainer.dim() != 2:
        raise UsageError(
            f"measure_mismatch() was given trainer log-probs, sampling log-probs and a mask of shapes {shapes}; the "
            "mismatch is taken token by token, so all three must be (B, T): slice them to the completion."
        )
    B, T = shapes[0]
    if applied is not None and tuple(applied.shape) not in ((B, T), (B, 1)):
        raise UsageError(
            f"measure_mismatch() was given an applied ratio of shape {tuple(applied.shape)} for log-probs of shape "
            f"{(B, T)}: pass (B, T) for a token-level correction or (B, 1) for a sequence-level one."
        )


def _log_bound(name: str, value: float | None) -> float:
    if value is None:
        return math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"measure_mismatch({name}={value!r}): it bounds a ratio, so it is a positive number or None.")
    return math.log(value)


def _k3(log_w: Tensor) -> Tensor:
    """w - 1 - log w, at least 0."""
    return torch.expm1(log_w.clamp(max=LOG_LIMIT)) - log_w


def _token_sums(
    d: Tensor, trainer: Tensor, engine: Tensor, used: Tensor, inside: Tensor, unscored: Tensor
) -> tuple[Tensor, Tensor]:
    """(len(TOKEN),) and (len(TOKEN_BOUNDS),), in the layout's order."""
    p, q = (x.clamp(max=LOG_LIMIT).exp() * used for x in (trainer, engine))
    mixture = torch.logaddexp(trainer, engine) - math.log(2.0) * used
    js = (_k3(trainer - mixture) + _k3(engine - mixture)) / 2
    gap, size = (p - q).abs(), d.abs()
    rows = [
        used,
        unscored,
        inside & ~used & ~unscored,
        _k3(d),
        _k3(-d),
        d.clamp(max=LOG_LIMIT).exp() * d,  # w log w
        torch.where(used, js, 0.0),
        torch.expm1(size.clamp(max=LOG_LIMIT)),
        p,
        q,
        p * p,
        q * q,
        p * q,
        gap,
        gap * gap,
    ]
    sums = torch.stack([row.double() for row in rows]).sum((1, 2))
    if d.numel() == 0:
        return sums, d.new_full((2,), -math.inf)
    return sums, torch.where(used, torch.stack([size, gap]), -math.inf).amax((1, 2))


def _sequence_sums(d: Tensor, trainer: Tensor, engine: Tensor, inside: Tensor, lengths: Tensor) -> Tensor:
    """(len(SEQUENCE),): perplexities are means over sequences of exp(-mean log-prob)."""
    has = lengths > 0
    log_ppls = -torch.stack([trainer, engine, d]).sum(-1) / lengths.clamp(min=1)  # (3, B)
    rows = torch.cat(
        [
            torch.stack([has, inside.sum(-1) > lengths, lengths]).double(),
            log_ppls[:2],
            log_ppls[2:].abs(),
            log_ppls.clamp(max=LOG_LIMIT).exp(),
        ]
    )
    return torch.where(has, rows, 0.0).sum(-1)
