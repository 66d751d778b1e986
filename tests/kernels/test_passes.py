"""Tile sizes and compaction."""

from __future__ import annotations

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.kernels import gemms
from driftscope.kernels.gemms import add_product_
from driftscope.kernels.head import default_workspace_bytes, padded, tile_rows
from driftscope.kernels.passes import compacted
from driftscope.kernels.row_stats import RowStats


@pytest.mark.parametrize(
    ("rows", "budget_rows", "expected"),
    [(16384, 2048, 2048), (16384, 2100, 2048), (5000, 2048, 2048), (100, 2048, 100), (7, 3, 3), (1, 1, 1), (0, 4, 1)],
)
def test_tiles_fill_the_budget(rows, budget_rows, expected):
    assert tile_rows(rows, 1000, 2, budget_rows * padded(1000) * 2) == expected


def test_a_budget_of_less_than_a_row_is_refused():
    with pytest.raises(UsageError, match="workspace_bytes=100"):
        tile_rows(8, 1000, 2, 100)


def test_the_default_workspace_of_a_trained_head_is_no_larger_than_its_gradient():
    weight = torch.empty(151936, 4096, dtype=torch.bfloat16, device="meta")
    assert default_workspace_bytes(weight, trainable=True) == 2 * weight.numel()
    assert default_workspace_bytes(weight, trainable=False) <= 700e6


@pytest.mark.parametrize(
    "alive", [[1, 0, 0, 1, 0, 1, 0, 0, 0, 1], [0] * 10, [0] * 9 + [1], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]]
)
def test_compaction_moves_every_living_row_to_the_front(alive):
    coefficients = torch.tensor(alive, dtype=torch.float32)
    tile = torch.arange(10.0)[:, None].expand(10, 3).contiguous()
    places = compacted(tile, coefficients)
    assert sorted(places.tolist()) == coefficients.nonzero().squeeze(1).tolist()
    assert tile[: len(places), 0].tolist() == places.tolist()


def test_compaction_leaves_a_full_tile_alone():
    assert compacted(torch.zeros(10, 3), torch.ones(10)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_summed_in_float32(dtype):
    """A thousand products of 1 + 2^-7 * 2^-3: lost at once in bf16."""
    total = torch.full((2, 2), float("nan"))
    a, b = torch.ones(2, 1, dtype=dtype), torch.full((1, 2), 2.0**-10, dtype=dtype)
    add_product_(total, torch.ones(2, 1, dtype=dtype), torch.ones(1, 2, dtype=dtype), first=True)
    for _ in range(64):
        add_product_(total, a, b, first=False)
    assert total.eq(1.0 + 64 * 2.0**-10).all()


@pytest.mark.parametrize(
    ("hidden_size", "budget_rows", "expected"),
    [(4096, 4096, 4096), (4096, 2048, 2048), (2048, 2616, 2048), (3584, 3584, 3584), (896, 2200, 2176)],
)
def test_tiles_fill_whole_waves_of_the_multiprocessors(hidden_size, budget_rows, expected):
    budget = budget_rows * padded(1000) * 2
    assert tile_rows(10**6, 1000, 2, budget, hidden_size=hidden_size, processors=132) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wide_products_are_not_rounded_to_the_inputs(dtype, device, monkeypatch):
    """In slices of the inner dimension where the device cannot write float32 itself; old contents are gone."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 300, generator=g).to(device, dtype), torch.randn(300, 7, generator=g).to(device, dtype)
    wanted = a.double() @ b.double()
    for slice_bytes in (1, 1 << 10, 1 << 28):
        monkeypatch.setattr(gemms, "SLICE_BYTES", slice_bytes)
        out = torch.full((5, 7), float("nan"), device=device)
        gemms.wide_product_(out, a, b)
        if device == "cuda" and not hasattr(torch.ops.aten.addmm, "dtype_out"):
            torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-2)
        else:
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 5, 129])
def test_statistics_of_any_number_of_rows_start_aligned(rows, device):
    vectors = vars(RowStats.empty(rows, torch.float32, torch.device(device))).values()
    assert all(v.shape == (rows,) and v.stride() == (1,) for v in vectors)
    assert all(v.data_ptr() % 16 == 0 for v in vectors)
