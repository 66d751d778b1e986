"""Which figures of a step record become columns: the objects of a record and their fields, by path."""

from __future__ import annotations

from typing import Any

from driftscope.reading.columns import Columns

Json = dict[str, Any]

ANALYSED = ("canary", "mismatch", "violations", "gradient", "profile", "scatter", "causes", "unexplained")
"""What only an analysed step has; light ones as a rule do not."""
STEP = ("live_grad_norm", "residual", "step_ms", "overhead_ms")
PATH = ("loss", "hidden_grad_norm", "param_grad_norm", "normalizer", "normalizer_measured", "coef_error")
GAP = ("grad_norm_ratio", "param_grad_norm_ratio", "loss_diff", "cosine", "noise_floor")
RATIO = ("cap", "kept_mass", "truncated_support_share")
STATS = ("mean", "min", "max", "share_capped", "share_masked", "ess")
QUANTILES = ("p05", "p25", "p50", "p75", "p95")
SERIES = ("value", "score")
DISTRIBUTIONS = ("raw", "raw_token", "applied")
CANARY = ("rms", "rest_rms", "noise_floor", "bf16_noise")
COST = ("time_ms", "peak_bytes")
CADENCE = ("spectrum_every", "deep_every", "spent", "budget")
RANKS = ("processes", "slowest_ms", "median_ms")
ESTIMATE = ("value", "error")
MISMATCH = ("tokens", "sequences", "unscored", "nonfinite", "incomplete", "mean_length", "share_outside")
WEIGHTS = ("mean", "std", "min", "max", "ess", "chi2", "share_outside", "share_over_cap", "share_zero", "clamped")
LEVELS = ("token", "geometric", "product")
BLOCKS = {
    "log_difference": ("mean", "abs_mean", "std", "abs_max", "mult_prob_error"),
    "divergence": ("k1", "k3", "k1_reverse", "k3_reverse", "js", "chi2_token", "chi2_sequence"),
    "perplexity": ("trainer", "engine", "ratio", "log_diff", "log_abs_diff"),
    "probability": ("correlation", "abs_diff_mean", "abs_diff_max"),
}
SPREAD = ("p05", "p50", "p95", "p99")
COUNTS = frozenset({"tokens", "sequences", "unscored", "nonfinite", "incomplete", "clamped"})  # 0 where not written


def add_figures(columns: Columns, record: Json, place: int, analysed: bool) -> None:
    """Put every figure of one record into its column. Raises where an object of the record is not one.

    analysed: whether it holds any of ``ANALYSED``, or may do so by its tier.
    """
    if not analysed and _add_light(columns, record, place):
        return
    paths, gap, ratio = record.get("paths") or _NOTHING, record.get("gap"), record.get("is_ratio")
    drift = record.get("drift") or _NOTHING
    timed = record.get("step_ms")
    spent = record.get("overhead_ms") or 0.0 if timed is not None else None  # a share of timed steps only
    row: list[Any] = [record.get("live_grad_norm"), record.get("residual"), timed, spent]
    for path in paths.values():
        row += map(path.get, PATH)
    if gap is not None:
        row += map(gap.get, GAP)
    there = _ratio_row(ratio, row) if ratio is not None else 0
    for series in drift.values():
        row += map(series.get, SERIES)
    kind = (gap is not None, ratio is not None, there, tuple(paths), tuple(drift))
    rows = columns.rows(kind) or columns.new_rows(kind, _names(*kind))
    step = record["step"]
    rows.add(row, step, place, columns.stretches)
    if (cadence := record.get("cadence")) is not None:
        columns.add("cadence", CADENCE, map(cadence.get, CADENCE), step, place)
    if (ranks := record.get("ranks")) is not None:
        columns.add("ranks", RANKS, map(ranks.get, RANKS), step, place)
    if analysed:
        _add_analysis(columns, record, step, place)


def _ratio_row(ratio: Json, row: list[Any]) -> int:
    """Add the ratio's figures to a row; which of its distributions and their quantiles are there, as bits."""
    row += map(ratio.get, RATIO)
    there, bit = 0, 1
    for which in DISTRIBUTIONS:
        stats = ratio.get(which)
        if stats is not None:
            there |= bit
            row += map(stats.get, STATS)
            if quantiles := stats.get("quantiles"):
                there |= bit << 1
                row += map(quantiles.get, QUANTILES)
        bit <<= 2
    return there


def _names(gap: bool, ratio: bool, there: int, paths: tuple[str, ...], drift: tuple[str, ...]) -> list[str]:
    """The columns of such a row, in its order."""
    names = [*STEP, *(f"paths.{path}.{key}" for path in paths for key in PATH)]
    names += [f"gap.{key}" for key in GAP] if gap else []
    names += [f"is_ratio.{key}" for key in RATIO] if ratio else []
    for which in DISTRIBUTIONS:
        names += [f"is_ratio.{which}.{key}" for key in STATS] if there & 1 else []
        names += [f"is_ratio.{which}.quantiles.{key}" for key in QUANTILES] if there & 2 else []
        there >>= 2
    return names + [f"drift.{name}.{key}" for name in drift for key in SERIES]


def _add_light(columns: Columns, record: Json, place: int) -> bool:
    """The usual light record, of which a long run has most, in one row; whether it was one."""
    paths, ratio, drift = record.get("paths"), record.get("is_ratio"), record.get("drift") or _NOTHING
    if not paths or len(paths) != 1 or ratio is None or record.get("gap") is not None or "ranks" in record:
        return False
    raw, token, applied = ratio.get("raw"), ratio.get("raw_token"), ratio.get("applied")
    if raw is None or token is None or applied is None or record.get("cadence") is not None:
        return False
    ((live, path),) = paths.items()
    if raw.get("quantiles") or token.get("quantiles") or applied.get("quantiles"):
        return False
    kind = (live, *drift)
    rows = columns.rows(kind) or columns.new_rows(kind, _light_names(live, drift))
    get, timed = record.get, record.get("step_ms")
    r, t, a = raw.get, token.get, applied.get
    row = [
        get("live_grad_norm"), get("residual"), timed, get("overhead_ms") or 0.0 if timed is not None else None,
        *map(path.get, PATH), *map(ratio.get, RATIO),
        r("mean"), r("min"), r("max"), r("share_capped"), r("share_masked"), r("ess"),
        t("mean"), t("min"), t("max"), t("share_capped"), t("share_masked"), t("ess"),
        a("mean"), a("min"), a("max"), a("share_capped"), a("share_masked"), a("ess"),
    ]  # fmt: skip
    for series in drift.values():
        row.append(series.get("value"))
        row.append(series.get("score"))
    rows.add(row, record["step"], place, columns.stretches)
    return True


def _light_names(live: str, drift: Json) -> list[str]:
    return [
        *STEP, *(f"paths.{live}.{key}" for key in PATH), *(f"is_ratio.{key}" for key in RATIO),
        *(f"is_ratio.{which}.{key}" for which in DISTRIBUTIONS for key in STATS),
        *(f"drift.{name}.{key}" for name in drift for key in SERIES),
    ]  # fmt: skip


_NOTHING: Json = {}


def _add_analysis(columns: Columns, record: Json, step: int, place: int) -> None:
    add = columns.add
    if (look := record.get("canary")) is not None:
        add("canary", CANARY, map(look.get, CANARY), step, place)
        distances = look.get("distances") or {}
        keys = tuple(sorted(distances))
        add("canary.distances", keys, map(distances.get, keys), step, place)
    for name, cost in (record.get("profile") or {}).items():
        add(f"profile.{name}", COST, map(cost.get, COST), step, place)
    if (gradient := record.get("gradient")) is not None:
        for name in ("norm_ratio", "cosine", "difference", "accumulated"):
            if (estimate := gradient.get(name)) is not None:
                add(f"gradient.{name}", ESTIMATE, map(estimate.get, ESTIMATE), step, place)
        if (bias := gradient.get("bias")) is not None:
            add("gradient.bias.size", ESTIMATE, map(bias["size"].get, ESTIMATE), step, place)
    if (mismatch := record.get("mismatch")) is not None:
        _add_mismatch(columns, mismatch, step, place)


def _add_mismatch(columns: Columns, mismatch: Json, step: int, place: int) -> None:
    add = columns.add
    add("mismatch", MISMATCH, _counted(mismatch, MISMATCH), step, place)
    for which in ("raw", "applied"):
        levels = mismatch.get(which)
        if levels is None and which == "applied":
            continue
        for level in LEVELS:
            weights = (levels or {}).get(level) or {}
            add(f"mismatch.{which}.{level}", WEIGHTS, _counted(weights, WEIGHTS), step, place)
            if quantiles := weights.get("quantiles"):
                add(f"mismatch.{which}.{level}.quantiles", SPREAD, map(quantiles.get, SPREAD), step, place)
    for name, keys in BLOCKS.items():
        if (block := mismatch.get(name)) is not None:
            add(f"mismatch.{name}", keys, map(block.get, keys), step, place)
    difference = mismatch.get("log_difference") or {}
    for name in ("quantiles", "abs_quantiles"):
        if quantiles := difference.get(name):
            add(f"mismatch.log_difference.{name}", SPREAD, map(quantiles.get, SPREAD), step, place)


def _counted(found: Json, keys: tuple[str, ...]) -> list[Any]:
    """The values of ``keys``; a count that is not written is 0, as in the record format."""
    return [found.get(key, 0) if key in COUNTS else found.get(key) for key in keys]
