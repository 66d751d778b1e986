"""The fused pass against plain numpy formulas, on even and odd batches, and how often it waits for the device."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from driftscope.errors import UsageError
from driftscope.is_ratio import describe_ratio
from driftscope.mismatch import FORMULAS, Mismatch, MismatchSums, figures, layout, measure_mismatch, merge
from driftscope.spec import LossSpec
from tests.mismatch import plain

RTOL, ATOL = 1e-9, 1e-12  # float64 sums in another order


def agree(flat, expected):
    """Both hold the same figures, quantiles aside."""
    flat = {k: v for k, v in flat.items() if "quantiles" not in k}
    assert set(flat) == set(expected)
    for name, value in expected.items():
        assert flat[name] == pytest.approx(value, rel=RTOL, abs=ATOL), name


@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 7), (3, 1), (5, 33), (8, 128), (17, 101)])
@pytest.mark.parametrize("kind", [None, "token", "token_mask", "sequence"])
def test_every_figure_is_its_formula(B, T, kind):
    trainer, engine, mask, weight = plain.batch(B, T, seed=B * T, applied=kind)
    level = kind and kind.split("_")[0]
    cap = 1.2 if kind else None
    sums = measure_mismatch(trainer, engine, mask, applied=weight, applied_level=level, cap=cap)
    agree(figures(sums).flat(), plain.plain_figures(trainer, engine, mask, weight, level, cap))


def test_every_number_has_a_formula_and_every_formula_a_number():
    trainer, engine, mask, weight = plain.batch(6, 40, applied="token")
    flat = figures(measure_mismatch(trainer, engine, mask, applied=weight, cap=1.2, floor=0.1)).flat()
    assert set(flat) == set(FORMULAS)
    assert all(FORMULAS[name].id == name and FORMULAS[name].unit for name in flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_taken_as_they_are(dtype):
    trainer, engine, mask, _ = plain.batch(4, 50, dtype=dtype)
    agree(figures(measure_mismatch(trainer, engine, mask)).flat(), plain.plain_figures(trainer, engine, mask))


def test_ratios_that_differ_from_one_by_rounding_keep_their_digits():
    engine = torch.full((4, 256), -1.0, dtype=torch.float64)
    trainer = engine + 1e-9 * torch.randn(4, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    d = (trainer - engine).numpy()
    out = figures(measure_mismatch(trainer, engine, torch.ones(4, 256)))
    assert out.raw.token.std == pytest.approx(d.std(), rel=1e-6)
    assert out.divergence.k3 == pytest.approx((d**2 / 2).mean(), rel=1e-6)
    assert out.raw.token.chi2 == pytest.approx(np.expm1(2 * d).mean(), rel=1e-6)


def test_identical_policies_are_at_the_ideal():
    trainer, _, mask, _ = plain.batch(4, 20)
    out = figures(measure_mismatch(trainer, trainer, mask))
    assert (out.raw.token.mean, out.raw.product.mean, out.raw.token.ess) == (1.0, 1.0, 1.0)
    assert (out.divergence.k1, out.divergence.k3, out.raw.token.std) == (0.0, 0.0, 0.0)
    assert out.divergence.js == pytest.approx(0.0, abs=1e-16)
    assert out.probability.correlation == pytest.approx(1.0)
    assert [b.count for b in out.histogram] == [out.tokens]


def test_quantiles_are_order_statistics_within_the_stated_error():
    trainer, engine, mask, weight = plain.batch(16, 200, noise=2.0, applied="token")
    out = figures(measure_mismatch(trainer, engine, mask, applied=weight))
    d = (trainer - engine)[mask].numpy()
    bound = lambda x: layout.QUANTILE_ERROR * min(abs(x), 1.0) + 1e-8  # noqa: E731
    for name, value in out.log_difference.quantiles.items():
        exact = np.quantile(d, int(name[1:]) / 100, method="inverted_cdf")
        assert abs(value - exact) <= bound(exact), name
        assert math.log(out.raw.token.quantiles[name]) == pytest.approx(value)
    for name, value in out.log_difference.abs_quantiles.items():
        exact = np.quantile(abs(d), int(name[1:]) / 100, method="inverted_cdf")
        assert abs(value - exact) <= bound(exact), name
    sums = ((trainer - engine) * mask).sum(-1)[mask.any(-1)].numpy()
    for name, value in out.raw.product.quantiles.items():
        exact = np.quantile(sums, int(name[1:]) / 100, method="inverted_cdf")
        assert abs(math.log(value) - exact) <= max(0.05, 0.05 * abs(exact)), name
    used = np.sort(weight[mask].numpy())
    assert out.applied.token.quantiles["p99"] == pytest.approx(1.2)
    assert out.applied.token.quantiles["p50"] == pytest.approx(used[math.ceil(len(used) / 2) - 1], rel=0.053)


def test_by_probability_and_by_position():
    trainer, engine, mask, _ = plain.batch(9, 150, noise=0.5)
    out = figures(measure_mismatch(trainer, engine, mask))
    d, q, m = (trainer - engine).numpy(), engine.exp().numpy(), mask.numpy()
    column = np.broadcast_to(np.arange(150), d.shape)
    relative = column / np.maximum(m.sum(-1, keepdims=True), 1)
    for bins, where in ((out.by_probability, q), (out.by_decile, relative), (out.by_octave, column + 1)):
        assert sum(b.count for b in bins) == out.tokens
        for i, b in enumerate(bins):
            high = math.inf if b.high is None or (bins is out.by_probability and i == len(bins) - 1) else b.high
            # An edge of the decile such as 0.3 is no float: compare as the quotient is computed.
            inside = m & (where >= b.low - 1e-12) & (where < high - 1e-12)
            assert b.count == inside.sum()
            if b.count:
                assert b.mean == pytest.approx(d[inside].mean(), abs=1e-12)
                assert b.abs_mean == pytest.approx(abs(d[inside]).mean())
                assert b.std == pytest.approx(d[inside].std(), abs=1e-9)
            else:
                assert b.mean is None


def test_merging_micro_batches_gives_the_whole():
    trainer, engine, mask, weight = plain.batch(12, 64, applied="token")
    keys = {"applied_level": "token", "cap": 1.2}
    whole = measure_mismatch(trainer, engine, mask, applied=weight, **keys)
    parts = [
        measure_mismatch(trainer[i], engine[i], mask[i], applied=weight[i], **keys)
        for i in (slice(0, 1), slice(1, 2), slice(2, 7), slice(7, 12))
    ]
    one = merge(*parts)
    other = merge(parts[3], merge(merge(parts[1], parts[0]), parts[2]))
    for merged in (one, other, whole.unpack(torch.stack([p.pack() for p in parts]))):
        torch.testing.assert_close(merged.packed, whole.packed, rtol=1e-12, atol=1e-12)
        assert (merged.cap, merged.applied_level) == (1.2, "token")
    # two collectives: SUM of the first part, MAX of the rest
    rows = torch.stack([p.pack() for p in parts])
    by_hand = torch.cat([rows[:, : layout.SUMS].sum(0), rows[:, layout.SUMS :].amax(0)])
    assert torch.equal(by_hand, one.packed)
    shorter = measure_mismatch(trainer[:2, :30], engine[:2, :30], mask[:2, :30], applied=weight[:2, :30], **keys)
    assert figures(merge(one, shorter)).tokens == int(mask.sum() + mask[:2, :30].sum())


def test_merging_what_does_not_fit_is_refused():
    trainer, engine, mask, weight = plain.batch(4, 8, applied="sequence")
    plainly = measure_mismatch(trainer, engine, mask)
    capped = measure_mismatch(trainer, engine, mask, cap=3.0)
    with pytest.raises(UsageError, match=r"cap=3\.0"):
        merge(plainly, capped)
    sequence = measure_mismatch(trainer, engine, mask, applied=weight)
    token = measure_mismatch(trainer, engine, mask, applied=weight.expand(4, 8))
    with pytest.raises(UsageError, match="applied level"):
        merge(sequence, token)
    assert merge(plainly, sequence).applied_level == "sequence"
    with pytest.raises(UsageError, match=str(layout.SIZE)):
        plainly.unpack(torch.zeros(3))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (3, 4)])
def test_nothing_to_measure_has_no_figures(shape):
    zeros = torch.zeros(shape)
    out = figures(measure_mismatch(zeros, zeros, zeros, applied=torch.ones(shape), cap=3.0))
    assert (out.tokens, out.sequences) == (0, 0)
    assert out.raw.token.mean is None
    assert out.divergence.k1 is None
    assert out.get("raw.token.mean") is None
    some = plain.batch(3, 5)
    full = measure_mismatch(*some[:3], applied=torch.ones(3, 5), cap=3.0)
    merged = merge(full, measure_mismatch(zeros, zeros, zeros, applied=torch.ones(shape), cap=3.0))
    assert figures(merged) == figures(full)


def test_tokens_that_are_not_finite_are_counted_and_left_out():
    trainer, engine, mask, _ = plain.batch(6, 30, seed=3)
    mask[0] = mask[2] = True
    engine[0, 3] = math.nan
    engine[0, 4] = -math.inf
    trainer[2, 0] = math.nan
    trainer[2, 1] = math.inf
    mask[4, 28:] = False
    trainer[4, 28] = engine[4, 29] = math.nan  # masked out: nobody's business
    out = figures(measure_mismatch(trainer, engine, mask))
    assert (out.unscored, out.nonfinite, out.incomplete) == (1, 3, 2)
    agree(out.flat(), plain.plain_figures(trainer, engine, mask))


def test_applied_weights_that_are_not_finite_are_left_out():
    zeros, ones = torch.zeros(2, 4), torch.ones(2, 4)
    weight = torch.tensor([[1.0, math.nan, 2.0, math.inf], [-1.0, 0.0, 3.0, 1.0]])
    out = figures(measure_mismatch(zeros, zeros, ones, applied=weight, cap=3.0))
    assert out.applied.token.count == 5
    assert out.applied.token.mean == pytest.approx(7 / 5)
    assert out.applied.token.share_over_cap == pytest.approx(1 / 5)
    assert out.applied.token.share_zero == pytest.approx(1 / 5)
    assert (out.applied.product.min, out.applied.product.max) == (0.0, pytest.approx(2.0))


def test_a_wholly_masked_sequence_correction_has_no_effective_sample():
    zeros, ones = torch.zeros(3, 4), torch.ones(3, 4)
    out = figures(measure_mismatch(zeros, zeros, ones, applied=torch.zeros(3, 1), cap=3.0))
    assert out.applied_level == "sequence"
    assert (out.applied.product.mean, out.applied.product.ess, out.applied.product.share_zero) == (0.0, 0.0, 1.0)
    assert out.applied.product.log_mean is None
    assert out.applied.product.quantiles["p50"] == 0.0


@pytest.mark.parametrize("gap", [30.0, 1e3, 1e6, 1e35])
def test_huge_differences_stay_finite(gap):
    engine = torch.full((3, 50), -1.0)
    trainer = engine.clone()
    trainer[0, 0] -= gap
    trainer[1, 0] += gap
    out = figures(measure_mismatch(trainer, engine, torch.ones(3, 50)))
    text = out.model_dump_json()
    assert "NaN" not in text and "Infinity" not in text
    assert all(math.isfinite(v) for v in out.flat().values())
    assert out.raw.token.clamped == (0 if gap < 300 else 2)
    assert out.raw.token.quantiles["p50"] == 1.0
    assert Mismatch.model_validate_json(text) == out
    assert sum(b.count for b in out.histogram) == 150


def test_a_cap_in_the_trainers_dtype_is_at_the_cap():
    for cap in (3.0, 2.2, 1.3):  # float32 holds 2.2 a little above, 1.3 a little below
        weight = torch.full((1, 3), 5.0).clamp(max=cap)
        out = figures(
            measure_mismatch(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3), applied=weight, cap=cap)
        )
        assert out.applied.token.share_over_cap == 1.0


@pytest.mark.parametrize(
    "given",
    [
        {"sampling_logps_BT": torch.zeros(2, 3)},
        {"mask_BT": torch.ones(2)},
        {"applied": torch.ones(4, 2)},
        {"cap": 0.0},
        {"cap": math.nan},
        {"floor": -1.0},
    ],
)
def test_what_does_not_fit_is_refused(given):
    arguments = {"trainer_logps_BT": torch.zeros(2, 4), "sampling_logps_BT": torch.zeros(2, 4)}
    arguments |= {"mask_BT": torch.ones(2, 4)} | given
    with pytest.raises(UsageError, match="measure_mismatch"):
        measure_mismatch(**arguments)


class Readings(TorchDispatchMode):
    """Operators that need a value on the host or whose output's shape depends on one."""

    SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in func.name() for name in self.SYNCHRONISING):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_one_synchronisation(monkeypatch):
    trainer, engine, mask, weight = plain.batch(4, 32, applied="token")
    reads = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *a, _name=name, _original=original, **k):
            reads.append(_name)
            return _original(self, *a, **k)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with Readings() as readings:
        sums = merge(
            measure_mismatch(trainer, engine, mask, applied=weight, cap=1.2),
            measure_mismatch(trainer, engine, mask, applied=weight, cap=1.2),
        )
        assert reads == [] and readings.seen == []
        figures(sums)
    assert reads == ["tolist"]
    assert [name for name in readings.seen if "_local_scalar_dense" not in name] == []


def test_the_pass_needs_no_value_at_all():
    """Tensors without data: whatever would read one raises."""
    meta = torch.empty(4, 32, device="meta")
    for applied in (None, meta, torch.empty(4, 1, device="meta")):
        sums = measure_mismatch(meta, meta, meta, applied=applied, cap=3.0)
        assert isinstance(sums, MismatchSums)
        assert merge(sums, sums).packed.shape == (layout.SIZE,)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_it_agrees_with_the_records_own_ratio_statistics(mode):
    kind = {"token_truncate": "token", "token_mask": "token_mask"}.get(mode, "sequence")
    trainer, engine, mask, weight = plain.batch(8, 60, noise=0.1, applied=kind)
    spec = LossSpec(is_correction=True, is_mode=mode, is_cap=1.2)
    record = describe_ratio(spec, (trainer - engine) * mask, mask, weight)
    out = figures(measure_mismatch(trainer, engine, mask, applied=weight, cap=1.2))
    level = "product" if mode.startswith("sequence") else "token"
    for theirs, ours in ((record.raw, getattr(out.raw, level)), (record.applied, getattr(out.applied, level))):
        assert theirs.count == ours.count
        for name in ("mean", "std", "min", "max", "ess"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9), name
    if mode.endswith("mask"):
        assert getattr(out.applied, level).share_zero == pytest.approx(record.applied.share_masked)


def test_nothing_is_changed_and_no_graph_is_kept():
    trainer, engine, mask, weight = plain.batch(4, 16, applied="token")
    trainer.requires_grad_()
    before = [x.detach().clone() for x in (trainer, engine, mask, weight)]
    state = torch.get_rng_state()
    sums = measure_mismatch(trainer, engine, mask, applied=weight)
    assert not sums.packed.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    for x, y in zip((trainer, engine, mask, weight), before, strict=True):
        assert torch.equal(x.detach(), y)


def test_the_layout_is_one_tiling():
    sections = sorted(layout.WHERE.values(), key=lambda s: s.start)
    assert [s.start for s in sections] == [0, *(s.stop for s in sections[:-1])]
    assert sections[-1].stop == layout.SIZE
    assert list(layout.EDGES) == sorted(set(layout.EDGES))
    assert json.dumps(FORMULAS["divergence.k3"].names)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", [None, "token", "sequence"])
def test_on_a_gpu_it_never_waits_and_says_the_same(kind):
    trainer, engine, mask, weight = plain.batch(8, 256, applied=kind)
    here = measure_mismatch(trainer, engine, mask, applied=weight, cap=1.2)
    there = [None if x is None else x.cuda() for x in (trainer, engine, mask, weight)]
    measure_mismatch(*there[:3], applied=there[3], cap=1.2)  # the tables are copied once
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = measure_mismatch(*there[:3], applied=there[3], cap=1.2)
        merge(sums, sums)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(sums.packed.cpu(), here.packed, rtol=1e-10, atol=1e-12)
