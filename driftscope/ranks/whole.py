"""The record of a whole micro-batch from the shares of all ranks.

The trainer takes the mean of the ranks' gradients, so on the whole batch a coefficient is that of its rank divided by
the number of processes P, and hidden states of different ranks are different rows:

    loss = mean_r loss_r        |g|^2 = sum_r |g_r|^2 / P^2        <a, b> = sum_r <a_r, b_r> / P^2

Relative errors are those of the sums. A divisor D_r of rank r is one of P * D_r on the whole batch; where ranks divide
by different numbers, the one that gives the same mean weight to a token stands for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from driftscope import is_ratio
from driftscope.explanation import Explanation, add_explanations
from driftscope.is_ratio import KeptMass
from driftscope.ranks.quantiles import mixture_quantiles
from driftscope.ranks.share import KNOTS, PATHS, RATIOS, Share
from driftscope.records import Gap, PathRecord, RatioStats, StepRecord


def merge(record: StepRecord, shares: Sequence[Share], details: dict[str, str]) -> StepRecord:
    """The record of the whole micro-batch: a copy of rank 0's with every figure that the ranks share in merged.

    record: what rank 0 has of it. shares: one a rank. details: what rank 0's causes change, in words.
    """
    out = record.model_copy(deep=True)
    present = [share for share in shares if share.present]
    size = len(shares)
    _counts(out, present)
    measured = [s for s in present if s.path(record.live, "hidden_grad_norm") is not None]
    if measured:
        pair = _pair(measured)
        agreed = [s for s in measured if s.gap == pair]
        for name in PATHS:
            merged = _path(name, out.paths.get(name), measured, size)
            if merged is not None:
                out.paths[name] = merged
        out.residual = _relative(measured, lambda s: s.get("residual"), lambda s: _norm(s, record.live))
        out.gap = _gap(pair, agreed, out)
        _causes(out, agreed, details)
    _ratio(out, present)
    return out


def _counts(out: StepRecord, present: Sequence[Share]) -> None:
    losses = [v for s in present if (v := s.path(out.live, "loss")) is not None]
    if losses:
        path = out.paths.setdefault(out.live, PathRecord(source="measured"))
        path.loss = sum(losses) / len(losses)
    for name in ("tokens", "completion_tokens"):
        known = [v for s in present if (v := s.get(name)) is not None]
        setattr(out, name, int(sum(known)) if known else None)
    weighed = [
        (v, n)
        for s in present
        if (v := s.get("zero_advantage_share")) is not None and (n := s.get("sequences")) is not None
    ]
    total = sum(n for _, n in weighed)
    out.zero_advantage_share = sum(v * n for v, n in weighed) / total if total else None
    out.nonfinite += [f"figures of rank {s.rank}" for s in present if s.rank != out.rank and s.get("nonfinite")]


def _path(name: str, own: PathRecord | None, shares: Sequence[Share], size: int) -> PathRecord | None:
    """One path over all ranks, or what rank 0 has of it where no rank measured it."""
    having = [s for s in shares if s.path(name, "hidden_grad_norm") is not None]
    if not having:
        return own
    out = own.model_copy() if own is not None else PathRecord()
    losses = [v for s in having if (v := s.path(name, "loss")) is not None]
    out.loss = sum(losses) / len(losses) if losses else None
    out.hidden_grad_norm = math.sqrt(sum(_norm(s, name) ** 2 for s in having)) / size
    out.coef_error = _relative(having, lambda s: s.path(name, "coef_error"), lambda s: _norm(s, "oracle"))
    out.fused_call_error = _relative(having, lambda s: s.path(name, "fused_call_error"), lambda s: _norm(s, name))
    for field in ("normalizer", "normalizer_measured"):
        setattr(out, field, _divisor([(s.path(name, field), s.get("tokens")) for s in having], size))
    out.note = None
    return out


def _divisor(parts: Sequence[tuple[float | None, float | None]], size: int) -> float | None:
    """The divisor on the whole batch: (divisor, tokens) of each rank; ``None`` where one is unknown."""
    known = [(d, t) for d, t in parts if d and t is not None]
    tokens = sum(t for _, t in known)
    if len(known) < len(parts) or tokens <= 0:
        return None
    return size * tokens / sum(t / d for d, t in known)


def _norm(share: Share, path: str) -> float:
    return share.path(path, "hidden_grad_norm") or 0.0


def _relative(
    shares: Sequence[Share], error: Callable[[Share], float | None], scale: Callable[[Share], float]
) -> float | None:
    """sqrt(sum (error * scale)^2 / sum scale^2) over the ranks that have the error."""
    known = [(e, scale(s)) for s in shares if (e := error(s)) is not None]
    total = sum(x * x for _, x in known)
    if not known:
        return None
    return math.sqrt(sum((e * x) ** 2 for e, x in known) / total) if total > 0 else 0.0


def _pair(shares: Sequence[Share]) -> tuple[str, str] | None:
    """The two paths that most ranks compared."""
    pairs = Counter(s.gap for s in shares if s.gap is not None)
    return pairs.most_common(1)[0][0] if pairs else None


def _gap(pair: tuple[str, str] | None, shares: Sequence[Share], out: StepRecord) -> Gap | None:
    if pair is None:
        return None
    candidate, reference = pair
    a, b = out.paths[candidate], out.paths[reference]
    # over the same ranks, whichever others have one of the two
    squares = [(_norm(s, candidate) ** 2, _norm(s, reference) ** 2) for s in shares]
    up, down = sum(x for x, _ in squares), sum(y for _, y in squares)
    inner = sum((s.get("cosine") or 0.0) * _norm(s, candidate) * _norm(s, reference) for s in shares)
    floors = [v for s in shares if (v := s.get("noise_floor")) is not None]
    return Gap(
        candidate=candidate,
        reference=reference,
        grad_norm_ratio=math.sqrt(up / down) if down > 0 else None,
        loss_diff=a.loss - b.loss if a.loss is not None and b.loss is not None else None,
        cosine=max(-1.0, min(1.0, inner / math.sqrt(up * down))) if up > 0 and down > 0 else None,
        noise_floor=max(floors) if floors else None,
    )


def _causes(out: StepRecord, shares: Sequence[Share], details: dict[str, str]) -> None:
    parts = [found for s in shares if (found := s.explanation()) is not None]
    if not parts:
        out.causes, out.unexplained = [], None
        return
    whole = add_explanations(parts)
    named = Explanation(
        {cause: details.get(cause, "") for cause in whole.details},
        whole.squares,
        whole.actual,
        whole.left,
        whole.tolerance,
    )
    out.causes, out.unexplained = named.causes()
    for cause in out.causes:
        cause.detail = cause.detail or None


def _ratio(out: StepRecord, present: Sequence[Share]) -> None:
    if out.is_ratio is None:
        return
    for name in RATIOS:
        own: RatioStats | None = getattr(out.is_ratio, name)
        parts = [p for s in present if (p := s.ratio(name)) is not None]
        if own is not None and parts:
            setattr(out.is_ratio, name, merge_ratio(own, parts))
    sums = [kept for s in present if (kept := s.kept) is not None]
    if not sums:
        return
    causes = out.is_ratio.causes
    out.is_ratio.causes = [c for c in causes if c.id not in ("truncated_support", "sequence_product")]
    is_ratio.truncated_support(
        out.is_ratio,
        KeptMass(
            sum(k.count for k in sums),
            sum(k.kept for k in sums),
            sum(k.log_kept for k in sums),
            sum(k.log_ratio for k in sums),
        ),
    )
    if out.canary is not None:  # it took the ratio apart on tokens of its own
        out.is_ratio.causes = causes


def quantiles_from_bins(record: StepRecord) -> None:
    """Where the mismatch of all ranks is on record, take the ratio's quantiles from its bins (within 5%).

    Ratios that were set to zero are in no bin of a log ratio: with any of them the quantiles stay as they are.
    """
    out, found = record.is_ratio, record.mismatch
    if out is None or found is None:
        return
    for name in RATIOS:
        stats: RatioStats | None = getattr(out, name)
        levels = found.applied if name == "applied" else found.raw
        if stats is None or levels is None or stats.share_masked:
            continue
        bins = levels.product if stats.level == "sequence" else levels.token
        if bins.count == stats.count and bins.quantiles.keys() >= stats.quantiles.keys():
            stats.quantiles = {name: bins.quantiles[name] for name in stats.quantiles}


def merge_ratio(own: RatioStats, parts: Sequence[dict[str, float]]) -> RatioStats:
    """The distribution over all ranks: exact but for the quantiles, which are those of the ranks' piecewise linear
    distribution functions together.
    """
    count = sum(p["count"] for p in parts)
    total = sum(p["count"] * p["mean"] for p in parts)
    square = sum(p["count"] * (p["std"] ** 2 + p["mean"] ** 2) for p in parts)
    mean = total / count

    def share(name: str) -> float | None:
        known = [(p[name], p["count"]) for p in parts if math.isfinite(p[name])]
        return sum(v * n for v, n in known) / count if len(known) == len(parts) else None

    quantiles = mixture_quantiles(parts, KNOTS) if own.quantiles else {}
    return RatioStats(
        level=own.level,
        count=int(count),
        mean=mean,
        # sum of squared distances from the common mean, without the cancellation of square/n - mean^2
        std=math.sqrt(sum(p["count"] * (p["std"] ** 2 + (p["mean"] - mean) ** 2) for p in parts) / count),
        min=min(p["min"] for p in parts),
        max=max(p["max"] for p in parts),
        quantiles=dict(quantiles),
        share_capped=share("share_capped"),
        share_masked=share("share_masked"),
        ess=total * total / (count * square) if square > 0 else 0.0,
    )
