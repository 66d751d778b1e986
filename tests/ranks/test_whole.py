"""Shares of random batches merged: the same figures as of all sequences together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch

from driftscope.attribute import Scene, attribute, identify
from driftscope.batch import TokenBatch
from driftscope.explanation import Explanation, add_explanations
from driftscope.is_ratio import ratio_stats
from driftscope.ranks import FIELDS, Local, Share, empty_row, merge, row_of
from driftscope.ranks.quantiles import mixture_quantiles
from driftscope.ranks.share import KNOTS
from driftscope.ranks.whole import merge_ratio
from driftscope.records import Gap, PathRecord, StepRecord
from driftscope.spec import LossSpec
from driftscope.spectrum import HeadView, Spectrum
from tests.algebra_batches import B, random_batch

EXACT = 1e-12
FULL = LossSpec(
    loss_type="dapo", is_correction=True, is_mode="token_truncate", tool_mask=True, max_completion_length=11
)


def rows(batch: TokenBatch, part: slice) -> TokenBatch:
    """Some sequences of a batch."""
    return TokenBatch(
        **{
            name: value[part] if isinstance(value, torch.Tensor) else value
            for name, value in vars(batch).items()
            if value is not None
        }
    )


def scene_of(batch: TokenBatch, uu_BT: torch.Tensor) -> Scene:
    every = torch.ones(batch.logps_BT.shape, dtype=torch.bool)
    uu_N = uu_BT[every]
    view = HeadView(batch.logps_BT[every], torch.zeros_like(uu_N), uu_N, torch.zeros_like(uu_N))
    return Scene({"model": batch}, Spectrum({"model": view}, torch.zeros_like(uu_N), {}), every)


def measured(batch: TokenBatch, uu_BT: torch.Tensor, live: LossSpec, wanted: LossSpec) -> tuple[StepRecord, Local]:
    """What one rank would have on record of its sequences, and beside it."""
    scene = scene_of(batch, uu_BT)
    a, b = scene.path(live, "model"), scene.path(wanted, "model")
    record = StepRecord(step=1, micro_step=0, live="liger", tokens=int(batch.completion_mask_BT.sum()))
    for name, path, spec in (("liger", a, live), ("oracle", b, wanted)):
        record.paths[name] = PathRecord(
            loss=scene.coefficients(spec, "model").loss,
            hidden_grad_norm=scene.norm(path),
            coef_error=scene.distance(path, b) if name == "liger" else None,
            normalizer=scene.coefficients(spec, "model").normalizer,
        )
    record.gap = Gap(candidate="liger", reference="oracle", cosine=scene.cosine(a, b), noise_floor=1e-7)
    found = identify(scene, wanted, "model", a, tolerance=1e-9)
    local = Local(
        explanation=attribute(scene, wanted, "model", a, found, tolerance=1e-9), sequences=len(batch.logps_BT)
    )
    record.causes, record.unexplained = local.explanation.causes()
    return record, local


def batch_of(seed: int) -> tuple[TokenBatch, torch.Tensor]:
    batch = random_batch(seed, tools=True)
    ratio_BT = (batch.old_logps_BT - batch.sampling_logps_BT).exp().clamp(max=3.0)
    g = torch.Generator().manual_seed(seed + 100)
    uu_BT = torch.rand(batch.logps_BT.shape, generator=g, dtype=torch.float64) + 0.1
    return TokenBatch(**{**vars(batch), "is_ratio": ratio_BT}), uu_BT


def through_a_row(rank: int, record: StepRecord, local: Local) -> Share:
    return Share.read(rank, row_of(record, local))


@pytest.mark.parametrize("cuts", [[0, 3, 6], [0, 1, 5, 6]])
@pytest.mark.parametrize("seed", range(4))
def test_merged_shares_are_the_whole_batch(seed: int, cuts: Sequence[int]) -> None:
    batch, uu_BT = batch_of(seed)
    size = len(cuts) - 1
    live = FULL.replace(is_correction=False, tool_mask=False)
    on_ranks = [spec.replace(num_processes=size) for spec in (live, FULL)]
    parts = [measured(rows(batch, slice(a, b)), uu_BT[a:b], *on_ranks) for a, b in pairwise(cuts)]
    whole, _ = measured(batch, uu_BT, live, FULL)
    merged = merge(
        parts[0][0], [through_a_row(r, *part) for r, part in enumerate(parts)], parts[0][1].explanation.details
    )
    for name, path in whole.paths.items():
        for field in ("loss", "hidden_grad_norm", "coef_error", "normalizer"):
            wanted = getattr(path, field)
            wanted = wanted if wanted is None else pytest.approx(wanted, rel=EXACT)
            assert getattr(merged.paths[name], field) == wanted, (name, field)
    assert merged.gap.cosine == pytest.approx(whole.gap.cosine, rel=EXACT)
    ratio = whole.paths["liger"].hidden_grad_norm / whole.paths["oracle"].hidden_grad_norm
    assert merged.gap.grad_norm_ratio == pytest.approx(ratio, rel=EXACT)
    assert merged.tokens == whole.tokens
    assert {c.id for c in merged.causes} == {c.id for c in whole.causes} == {"is_correction", "tool_mask"}
    for cause in whole.causes:
        (same,) = [c for c in merged.causes if c.id == cause.id]
        assert same.factor == pytest.approx(cause.factor, rel=1e-9)
        assert same.share == pytest.approx(cause.share, rel=1e-9)
    assert merged.unexplained.share == whole.unexplained.share == 0.0


def test_a_rank_with_nothing_to_say_is_left_out() -> None:
    batch, uu_BT = batch_of(0)
    spec = FULL.replace(num_processes=2)
    record, local = measured(rows(batch, slice(0, 3)), uu_BT[:3], spec.replace(is_correction=False), spec)
    merged = merge(record, [through_a_row(0, record, local), Share.read(1, empty_row())], {})
    assert merged.paths["liger"].hidden_grad_norm == pytest.approx(
        record.paths["liger"].hidden_grad_norm / 2, rel=EXACT
    )
    assert merged.gap.cosine == pytest.approx(record.gap.cosine, rel=EXACT)
    assert [c.id for c in merged.causes] == [c.id for c in record.causes]
    assert merged.tokens == record.tokens


def test_rank_0_can_be_the_one_without_figures() -> None:
    batch, uu_BT = batch_of(1)
    spec = FULL.replace(num_processes=2)
    record, local = measured(rows(batch, slice(0, 3)), uu_BT[:3], spec.replace(is_correction=False), spec)
    blank = StepRecord(step=1, micro_step=0, live="liger")
    merged = merge(blank, [Share.read(0, empty_row()), through_a_row(1, record, local)], {})
    assert merged.gap.cosine == pytest.approx(record.gap.cosine, rel=EXACT)
    assert merged.causes[0].factor == pytest.approx(record.causes[0].factor, rel=EXACT)
    assert merged.paths["liger"].loss == record.paths["liger"].loss


def test_what_is_not_finite_stays_out_of_the_others() -> None:
    batch, uu_BT = batch_of(2)
    spec = FULL.replace(num_processes=2)
    good = measured(rows(batch, slice(0, 3)), uu_BT[:3], spec.replace(is_correction=False), spec)
    bad = StepRecord(step=1, micro_step=0, live="liger", nonfinite=["live hidden gradient"])
    bad.paths["liger"] = PathRecord(loss=math.nan, hidden_grad_norm=math.inf)
    merged = merge(good[0], [through_a_row(0, *good), through_a_row(1, bad, Local())], {})
    assert merged.paths["liger"].loss == good[0].paths["liger"].loss
    assert math.isfinite(merged.paths["liger"].hidden_grad_norm)
    assert merged.nonfinite == ["figures of rank 1"]


def test_more_causes_than_a_row_holds_are_left_out_and_not_cut() -> None:
    squares = {frozenset(): 1.0}
    names = ["is_correction", "normalizer", "tool_mask", "delta_clamp", "extra_terms"]
    for size in range(6):
        squares |= {frozenset(c): 1.0 for c in combinations(names, size)}
    local = Local(explanation=Explanation(dict.fromkeys(names, ""), squares, 1.0, 0.0, 1e-6))
    share = through_a_row(0, StepRecord(step=1, micro_step=0, live="liger"), local)
    assert share.explanation() is None


def test_explanations_of_other_causes_join() -> None:
    """A rank that needed no tool mask has the same norm with and without it."""
    batch, uu_BT = batch_of(3)
    parts = []
    for cut, live in ((slice(0, 1), FULL.replace(is_correction=False, tool_mask=False)),
                      (slice(1, B), FULL.replace(is_correction=False))):  # fmt: skip
        scene = scene_of(rows(batch, cut), uu_BT[cut])
        path = scene.path(live, "model")
        found = identify(scene, FULL, "model", path, tolerance=1e-9)
        parts.append(attribute(scene, FULL, "model", path, found, tolerance=1e-9))
    whole = add_explanations(parts)
    assert set(whole.details) == {"is_correction", "tool_mask"}
    for chosen, square in whole.squares.items():
        assert square == pytest.approx(
            parts[0].squares[chosen] + parts[1].squares[chosen & {"is_correction"}], rel=EXACT
        )
    with pytest.raises(ValueError, match="no explanation"):
        add_explanations([])


def parts_of(values: torch.Tensor, cuts: Sequence[int]) -> list[dict[str, float]]:
    made = []
    for a, b in pairwise(cuts):
        stats = ratio_stats(values[a:b], "token", cap=1.5)
        made.append({**stats.model_dump(exclude={"quantiles", "level"}), **stats.quantiles, "share_masked": math.nan})
    return made


@pytest.mark.parametrize("seed", range(5))
def test_a_ratio_over_ranks_is_that_of_all_tokens(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(3000, generator=g, dtype=torch.float64) * 0.4).exp()
    whole = ratio_stats(values, "token", cap=1.5)
    merged = merge_ratio(whole, parts_of(values, [0, 200, 1700, 3000]))
    for name in ("count", "mean", "std", "min", "max", "ess", "share_capped"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-12), name
    assert merged.share_masked is None
    for name in KNOTS:  # piecewise linear between a rank's quantiles
        assert merged.quantiles[name] == pytest.approx(whole.quantiles[name], rel=0.03), name


def test_quantiles_of_one_part_are_its_own_and_of_points_the_points() -> None:
    one = {"count": 10.0, "min": 0.0, "max": 9.0, **{n: float(i + 1) for i, n in enumerate(KNOTS)}}
    assert mixture_quantiles([one], KNOTS) == pytest.approx({n: one[n] for n in KNOTS})
    same = {"count": 4.0, "min": 2.0, "max": 2.0, **dict.fromkeys(KNOTS, 2.0)}
    assert mixture_quantiles([same, same], KNOTS) == dict.fromkeys(KNOTS, 2.0)
    assert mixture_quantiles([{**same, "min": math.nan}], KNOTS) == {}


def test_a_row_comes_back_as_it_was() -> None:
    batch, uu_BT = batch_of(0)
    record, local = measured(batch, uu_BT, FULL.replace(is_correction=False), FULL)
    row = row_of(record, local)
    assert len(row) == len(FIELDS) == len(set(FIELDS))
    share = Share.read(3, row)
    assert share.gap == ("liger", "oracle")
    back = share.explanation()
    assert back.squares == local.explanation.squares
    assert back.causes()[0][0].factor == record.causes[0].factor
    with pytest.raises(ValueError, match="argument 2 is"):
        Share.read(0, row[:-1])
