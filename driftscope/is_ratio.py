"""The importance sampling ratio of a batch, raw and applied, and how much of it truncated sampling explains.

Shapes: B sequences, T completion tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from driftscope.records import Cause, IsRatio, RatioStats
from driftscope.spec import LossSpec

SORTED_ROWS = 32
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MAX_QUANTILE_ITEMS = 1_000_000  # torch.quantile refuses more than 2^24 elements


def ratio_stats(
    values: Tensor, level: Literal["token", "sequence"], *, cap: float | None = None, masked: bool = False
) -> RatioStats:
    """Distribution of ratios given as a flat tensor (any dtype); one copy to the host.

    ``cap``: count the share at or over it as capped. ``masked``: count exact zeros as masked out.
    """
    w = values.detach().double().flatten()
    n = w.numel()
    if n == 0:
        return RatioStats(level=level, count=0)
    finite = w[torch.isfinite(w)]
    if finite.numel() == 0:
        return RatioStats(level=level, count=n)
    sample = finite if finite.numel() <= _MAX_QUANTILE_ITEMS else finite[:: finite.numel() // _MAX_QUANTILE_ITEMS + 1]
    at = torch.tensor(QUANTILES, dtype=torch.float64, device=w.device)
    square = (finite * finite).sum()
    ess = torch.where(square > 0, finite.sum() ** 2 / (finite.numel() * square.clamp(min=1e-300)), 0.0)
    head = [finite.mean(), finite.std(unbiased=False), finite.min(), finite.max(), ess]
    over = (w >= cap).double().mean() if cap is not None else w.new_tensor(float("nan"))
    row = torch.cat([torch.stack([*head, over, (w == 0).double().mean()]), torch.quantile(sample, at)]).tolist()
    return RatioStats(
        level=level,
        count=n,
        mean=row[0],
        std=row[1],
        min=row[2],
        max=row[3],
        ess=row[4],
        share_capped=row[5] if cap is not None and not masked else None,
        share_masked=row[6] if masked else None,
        quantiles={f"p{round(q * 100):02d}": v for q, v in zip(QUANTILES, row[7:], strict=True)},
    )


def describe_ratio(spec: LossSpec, log_ratio_BT: Tensor, mask_BT: Tensor, applied: Tensor | None) -> IsRatio:
    """Raw and applied importance sampling ratio of one batch.

    log_ratio_BT: log(old / sampling) per token, zero where masked. applied: (B, T) or (B, 1) as the loss multiplies
    it, or ``None`` where the correction is off.
    """
    keep = mask_BT.bool()
    rows = keep.any(-1)
    sequence = spec.is_mode.startswith("sequence")
    masks = spec.is_mode.endswith("mask")
    level: Literal["token", "sequence"] = "sequence" if sequence else "token"
    token = log_ratio_BT.double()[keep].exp()
    raw = log_ratio_BT.double().sum(-1)[rows].exp() if sequence else token
    out = IsRatio(
        mode=spec.is_mode,
        cap=spec.is_cap,
        raw=ratio_stats(raw, level, cap=spec.is_cap),
        raw_token=ratio_stats(token, "token"),
    )
    if applied is not None:
        used = applied[rows].flatten() if applied.shape[-1] == 1 else applied[keep]
        out.applied = ratio_stats(used, level, cap=spec.is_cap, masked=masks)
    return out


def kept_mass(log_p: Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Probability mass (n,) that truncated sampling keeps, given full log-probs (n, V).

    min_p drops tokens under ``min_p`` times the largest probability, top_k keeps the k largest, top_p keeps the
    smallest set of the rest whose renormalised mass reaches ``top_p`` (vLLM's order).
    """
    if log_p.shape[0] > SORTED_ROWS:  # the sorted copies of a few rows at a time
        parts = [kept_mass(part, top_p=top_p, top_k=top_k, min_p=min_p) for part in log_p.split(SORTED_ROWS)]
        return torch.cat(parts)
    p = log_p.double().exp().sort(-1, descending=True).values
    keep = torch.ones_like(p, dtype=torch.bool)
    if min_p > 0:
        keep &= p >= min_p * p[:, :1]
    if top_k and 0 < top_k < p.shape[-1]:
        keep &= torch.arange(p.shape[-1], device=p.device) < top_k
    if top_p < 1:
        inner = p * keep
        inner = inner / inner.sum(-1, keepdim=True)
        keep &= inner.cumsum(-1) - inner < top_p
    return (p * keep).sum(-1)


@dataclass(frozen=True)
class KeptMass:
    """Sums over tokens: how many, the mass that truncated sampling keeps, its log, and the log ratio; they add up."""

    count: float
    kept: float
    log_kept: float
    log_ratio: float


def sum_kept_mass(log_ratio_N: Tensor, kept_N: Tensor) -> KeptMass | None:
    """The sums over the tokens whose kept mass is known; both (N,), NaN in ``kept_N`` where it was not computed."""
    known = torch.isfinite(kept_N) & torch.isfinite(log_ratio_N)
    if not bool(known.any()):
        return None
    log_kept = kept_N[known].double().log()
    sums = torch.stack([log_kept.exp().sum(), log_kept.sum(), log_ratio_N[known].double().sum()])
    return KeptMass(float(known.sum()), *sums.tolist())


def truncated_support(out: IsRatio, sums: KeptMass) -> None:
    """Fill in what the kept mass explains.

    The engine's log-probs are renormalised over the kept set, the trainer's are not, so each token's log ratio carries
    log(kept mass); a sequence product carries it once a token.
    """
    out.kept_mass = sums.kept / sums.count
    if abs(sums.log_ratio) / sums.count < 1e-6:
        return  # nothing to explain
    out.truncated_support_share = sums.log_kept / sums.log_ratio
    share = min(max(out.truncated_support_share, 0.0), 1.0)
    out.causes = [
        Cause(
            id="truncated_support",
            share=share,
            factor=math.exp(sums.log_kept / sums.count),
            detail="geometric mean per token of the mass that top_p/top_k/min_p keeps",
        )
    ]
    if out.raw is not None and out.raw.level == "sequence" and out.raw_token is not None and out.raw.mean:
        out.causes.append(
            Cause(
                id="sequence_product",
                share=0.0,
                factor=out.raw.mean / out.raw_token.mean if out.raw_token.mean else None,
                detail="what multiplying the token ratios over a sequence makes of one token's ratio",
            )
        )
