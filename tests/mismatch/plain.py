"""The figures of a mismatch in plain float64 numpy, formula by formula, and batches to try them on."""

from __future__ import annotations

import numpy as np
import torch


def batch(B, T, seed=0, noise=0.3, applied=None, dtype=torch.float64):
    """Trainer and engine log-probs, a ragged mask (one row empty where B > 2) and, if asked for, applied weights."""
    g = torch.Generator().manual_seed(seed)
    engine = -(torch.rand(B, T, generator=g, dtype=torch.float64) ** 3) * 12
    trainer = engine + noise * torch.randn(B, T, generator=g, dtype=torch.float64) - noise / 10
    lengths = torch.randint(1, T + 1, (B, 1), generator=g)
    mask = torch.arange(T) < lengths
    if B > 2:
        mask[1] = False
    d = (trainer - engine) * mask
    weight = None
    if applied == "token":
        weight = d.exp().clamp(max=1.2)
    elif applied == "token_mask":
        weight = torch.where(d.exp() > 1.2, 0.0, d.exp())
    elif applied == "sequence":
        weight = d.sum(-1, keepdim=True).exp()
        weight = torch.where(weight > 1.2, 0.0, weight)
    return trainer.to(dtype), engine.to(dtype), mask, None if weight is None else weight.to(dtype)


def weight_figures(w, log_w, cap=None):
    """Figures of a flat array of weights."""
    if not len(w):
        return {"count": 0}
    some = log_w[w > 0]
    out = {
        "count": len(w),
        "mean": w.mean(),
        "std": w.std(),
        "min": w.min(),
        "max": w.max(),
        "ess": w.sum() ** 2 / (len(w) * (w**2).sum()) if w.any() else 0.0,
        "chi2": (w**2).mean() - 1,
        "log_mean": some.mean() if len(some) else None,
        "log_std": some.std() if len(some) else None,
        "share_outside": ((w < 0.9) | (w > 1.1)).mean(),
        "share_zero": (w == 0).mean(),
        "clamped": 0,
    }
    if cap is not None:
        out["share_over_cap"] = (w >= cap * (1 - 1e-9)).mean()
    return out


def plain_figures(trainer, engine, mask, weight=None, level=None, cap=None):
    """Every scalar of ``Mismatch.flat()`` but quantiles, from its definition."""
    lp, lq, keep = trainer.double().numpy(), engine.double().numpy(), mask.numpy().astype(bool)
    with np.errstate(all="ignore"):
        unscored = keep & np.isnan(lq)
        used = keep & np.isfinite(lp - lq)
    rows = [i for i in range(len(lp)) if used[i].any()]
    d = (lp - lq)[used]
    p, q = np.exp(lp[used]), np.exp(lq[used])
    out = {
        "tokens": len(d),
        "sequences": len(rows),
        "unscored": unscored.sum(),
        "nonfinite": (keep & ~used & ~unscored).sum(),
        "incomplete": sum(bool((keep[i] & ~used[i]).any()) for i in rows),
    }
    sums = np.array([(lp - lq)[i][used[i]].sum() for i in rows])
    means = np.array([(lp - lq)[i][used[i]].mean() for i in rows])
    for name, log_w in (("token", d), ("geometric", means), ("product", sums)):
        out.update({f"raw.{name}.{k}": v for k, v in weight_figures(np.exp(log_w), log_w, cap).items()})
    if weight is not None:
        a = np.broadcast_to(weight.double().numpy(), lp.shape)
        tokens = a[used]
        if level == "sequence":
            product = np.array([a[i][used[i]][0] for i in rows])
            geometric = np.array([a[i][used[i]][0] ** (1 / used[i].sum()) for i in rows])
        else:
            product = np.array([a[i][used[i]].prod() for i in rows])
            geometric = np.array([a[i][used[i]].prod() ** (1 / used[i].sum()) for i in rows])
        with np.errstate(divide="ignore"):
            for name, w in (("token", tokens), ("geometric", geometric), ("product", product)):
                out.update({f"applied.{name}.{k}": v for k, v in weight_figures(w, np.log(w), cap).items()})
    if cap is not None:
        out["cap"] = cap
    if not len(d):
        return {k: v for k, v in out.items() if v is not None}
    mean_p = np.array([lp[i][used[i]].mean() for i in rows])
    mean_q = np.array([lq[i][used[i]].mean() for i in rows])
    mixture = np.log((p + q) / 2)
    k3 = lambda x: np.exp(x) - x - 1  # noqa: E731
    out |= {
        "mean_length": len(d) / len(rows),
        "share_outside": ((np.exp(d) < 0.9) | (np.exp(d) > 1.1)).mean(),
        "log_difference.mean": d.mean(),
        "log_difference.abs_mean": abs(d).mean(),
        "log_difference.std": d.std(),
        "log_difference.abs_max": abs(d).max(),
        "log_difference.mult_prob_error": np.exp(abs(d)).mean(),
        "divergence.k1": -d.mean(),
        "divergence.k3": k3(d).mean(),
        "divergence.k1_reverse": (np.exp(d) * d).mean(),
        "divergence.k3_reverse": k3(-d).mean(),
        "divergence.js": ((k3(lp[used] - mixture) + k3(lq[used] - mixture)) / 2).mean(),
        "divergence.chi2_token": (np.exp(2 * d)).mean() - 1,
        "divergence.chi2_sequence": np.exp(2 * sums).mean() - 1,
        "perplexity.trainer": np.exp(-mean_p).mean(),
        "perplexity.engine": np.exp(-mean_q).mean(),
        "perplexity.ratio": np.exp(mean_q - mean_p).mean(),
        "perplexity.log_trainer": -mean_p.mean(),
        "perplexity.log_engine": -mean_q.mean(),
        "perplexity.log_diff": (mean_q - mean_p).mean(),
        "perplexity.log_abs_diff": abs(mean_q - mean_p).mean(),
        "perplexity.log_diff_max": (mean_q - mean_p).max(),
        "perplexity.log_diff_min": (mean_q - mean_p).min(),
        "probability.abs_diff_mean": abs(p - q).mean(),
        "probability.abs_diff_max": abs(p - q).max(),
        "probability.abs_diff_std": abs(p - q).std(),
    }
    if len(d) > 1:
        out["probability.correlation"] = np.corrcoef(p, q)[0, 1]
    return {k: v for k, v in out.items() if v is not None}
