"""A row of the sketch: the definition, coordinate by coordinate, against what runs here (Triton's interpreter too)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.kernels import sketch, sketch_torch
from driftscope.kernels.sketch import sketch_row
from driftscope.kernels.sketch_torch import buckets_and_signs, keys_of, mix
from tests.kernels.conftest import INTERPRETED

ROOT = Path(__file__).resolve().parents[2]
KEYS = keys_of(seed=7, index=3)
TOLERANCE = 2.5e-7  # of a float32 sum of 64 terms, relative to the row's norm; measured 1.7e-7
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def by_definition(values, size, offset=0, keys=KEYS):
    """Every coordinate on its own, in float64."""
    places = torch.arange(values.numel()) + offset
    buckets, signs = buckets_and_signs(places, keys, size)
    out = torch.zeros(size, dtype=torch.float64)
    return out.index_add_(0, buckets, signs * values.reshape(-1).cpu().double())


def error(row, wanted):
    return float((row.cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "count", "offset"),
    [(64, 1, 0), (64, 63, 1), (64, 64, 64), (128, 1000, 37), (1024, 5001, 0), (2048, 70_001, 3), (512, 9973, 10**10)],
)
def test_a_row_is_its_definition(device, dtype, size, count, offset):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype).to(device)
    row = sketch_row(values, KEYS, size, offset)
    assert row.dtype == torch.float64 and row.shape == (size,) and row.device.type == device
    assert error(row, by_definition(values, size, offset)) < TOLERANCE


@pytest.mark.parametrize("size", [64, 4096])
def test_a_block_fills_every_bucket_once(size):
    for block in (0, 1, 77, 2**31 // size + 5):
        buckets, signs = buckets_and_signs(torch.arange(size) + block * size, KEYS, size)
        assert sorted(buckets.tolist()) == list(range(size))
        assert set(signs.tolist()) == {1, -1}


def test_the_mixer_is_murmurhash3s_finaliser():
    """Known words of fmix32."""
    assert [mix(word) for word in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]


def test_parameters_seeds_and_blocks_hash_apart():
    """Buckets agree in 1 of k places and signs in 1 of 2, between parameters, seeds and neighbouring blocks."""
    size, count = 256, 256 * 400
    base = buckets_and_signs(torch.arange(count), keys_of(0, 0), size)
    pairs = [
        buckets_and_signs(torch.arange(count), keys_of(0, 1), size),
        buckets_and_signs(torch.arange(count), keys_of(1, 0), size),
        buckets_and_signs(torch.arange(count), keys_of(2**32, 0), size),
        buckets_and_signs(torch.arange(count) + size, keys_of(0, 0), size),
    ]
    for buckets, signs in pairs:
        # of 400 independent offsets; of 102,400 independent signs
        assert float((buckets == base[0]).double().mean()) < 6 / 256
        assert abs(float((signs * base[1]).double().mean())) < 4 / count**0.5


def test_signs_and_offsets_are_balanced_and_uncorrelated():
    size, blocks = 256, 2000
    buckets, signs = buckets_and_signs(torch.arange(size * blocks), KEYS, size)
    table = torch.zeros(blocks, size, dtype=torch.float64)
    table[torch.arange(size * blocks) // size, buckets] = signs.double()
    assert abs(float(table.mean())) < 4 / (size * blocks) ** 0.5
    gram = (table.T @ table / blocks).fill_diagonal_(0)  # between buckets
    assert float(gram.abs().max()) < 6 / blocks**0.5
    across = (table @ table.T / size).fill_diagonal_(0)  # between blocks
    assert float(across.abs().max()) < 6.5 / size**0.5
    offsets = (torch.arange(size * blocks)[::size] % size) ^ buckets[::size]
    counts = torch.bincount(offsets, minlength=size).double()
    assert float(((counts - blocks / size) ** 2).sum() / (blocks / size)) < size + 5 * (2 * size) ** 0.5  # chi squared


def test_the_same_bits_every_time(device):
    values = torch.randn(33_333, device=device)
    assert torch.equal(sketch_row(values, KEYS, 1024), sketch_row(values, KEYS, 1024))


@pytest.mark.parametrize("cuts", [[0, 12_345], [0, 1, 64, 8191, 8192, 20_000]])
def test_pieces_add_up_to_the_whole(device, cuts):
    values = torch.randn(30_000, device=device)
    parts = [sketch_row(values[a:b], KEYS, 512, offset=a) for a, b in zip(cuts, [*cuts[1:], 30_000], strict=True)]
    assert error(sum(parts), sketch_row(values, KEYS, 512).cpu()) < 2 * TOLERANCE


@pytest.mark.parametrize("tile", [1, 512, 1 << 12, 1 << 20])
def test_the_tile_of_the_plain_version_changes_rounding_only(monkeypatch, tile):
    monkeypatch.setattr(sketch_torch, "TILE_ELEMENTS", tile)
    values = torch.randn(5000, dtype=torch.float64)
    row = sketch_torch.flat_sketch(values, 77, KEYS, 512)
    assert error(row, by_definition(values, 512, 77)) < 1e-15


def test_rows_of_a_parameter_are_a_flat_range(device):
    """Rows [a, b) of dim 0, as FSDP2 and ZeRO hold them."""
    weight = torch.randn(37, 129, device=device)
    parts = [sketch_row(weight[a:b], KEYS, 256, offset=a * 129) for a, b in ((0, 10), (10, 30), (30, 37))]
    assert error(sum(parts), sketch_row(weight, KEYS, 256).cpu()) < 2 * TOLERANCE


@pytest.mark.parametrize("piece", [1 << 23, 700])
def test_gradients_in_any_layout(device, monkeypatch, piece):
    monkeypatch.setattr(sketch, "PIECE_ELEMENTS", piece)
    weight = torch.randn(50, 60, device=device)
    wanted = by_definition(weight.T.contiguous(), 128)
    assert error(sketch_row(weight.T, KEYS, 128), wanted) < TOLERANCE
    cube = torch.randn(1, 40, 30, device=device).transpose(1, 2)
    assert error(sketch_row(cube, KEYS, 128), by_definition(cube.contiguous(), 128)) < TOLERANCE
    assert (
        error(sketch_row(weight[::2, ::3], KEYS, 128), by_definition(weight[::2, ::3].contiguous(), 128)) < TOLERANCE
    )
    expanded = torch.ones((), device=device).expand(30, 40)
    assert error(sketch_row(expanded, KEYS, 128), by_definition(expanded.contiguous(), 128)) < TOLERANCE


def test_a_sparse_gradient_is_that_of_its_dense_form():
    dense = torch.zeros(20, 8)
    dense[3], dense[17] = 1.5, -2.0
    assert torch.equal(sketch_row(dense.to_sparse(), KEYS, 64), sketch_row(dense, KEYS, 64))


def test_nothing_has_a_sketch_of_zeros(device):
    for shape in ((0,), (0, 5), (5, 0)):
        assert torch.equal(sketch_row(torch.zeros(shape, device=device), KEYS, 64).cpu(), torch.zeros(64).double())
    assert float(sketch_row(torch.tensor(2.0, device=device), KEYS, 64).norm()) == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so_in_one_bucket(device, dtype, value):
    values = torch.randn(1000, device=device).to(dtype)
    values[17] = value
    assert int((~torch.isfinite(sketch_row(values, KEYS, 64))).sum()) == 1


def test_a_gradient_that_requires_grad_leaves_no_graph():
    assert not sketch_row(torch.ones(3, requires_grad=True), KEYS, 64).requires_grad


@pytest.mark.parametrize("size", [0, 32, 100, 1 << 23])
def test_a_size_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(UsageError, match=f"size={size}"):
        sketch_row(torch.ones(3), KEYS, size)


def test_what_is_no_gradient_is_refused():
    with pytest.raises(UsageError, match="int64"):
        sketch_row(torch.ones(3, dtype=torch.long), KEYS, 64)
    with pytest.raises(UsageError, match="offset=-1"):
        sketch_row(torch.ones(3), KEYS, 64, offset=-1)
    with pytest.raises(UsageError, match="covers"):
        sketch_row(torch.ones(3), KEYS, 64, offset=2**38)


def test_the_plain_version_keeps_to_its_workspace():
    """At most 64 MiB beyond the gradient, whatever its size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != whole:
                Largest.bytes = max(Largest.bytes, out.untyped_storage().nbytes())
            return out

    values = torch.ones(5_000_000)
    whole = values.untyped_storage().data_ptr()
    with Largest():
        sketch_torch.flat_sketch(values, 0, KEYS, 4096)
    assert 1 << 20 < Largest.bytes <= 8 * sketch_torch.TILE_ELEMENTS


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_slabs_of_a_large_gradient_add_up(monkeypatch):
    """Beyond 2^29 elements the kernel is launched again; here the limit is small."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    from driftscope.kernels import sketch_triton

    monkeypatch.setattr(sketch_triton, "SLAB", 1 << 10)
    monkeypatch.setattr(sketch_triton, "FEW_BLOCKS", 8)  # both lengths of a run
    values = torch.randn(3001)
    for offset in (0, 31, 5_000_000_001):
        assert (
            error(sketch_triton.flat_sketch(values, offset, KEYS, 64), by_definition(values, 64, offset)) < TOLERANCE
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_large_gradient_on_the_gpu(dtype):
    """More than one launch (2^29 elements each), against the plain version on the GPU, twice the same bits."""
    count = (1 << 29) + 123_457
    values = torch.randn(count, device="cuda", dtype=dtype)
    row = sketch_row(values, KEYS, 4096, offset=77)
    assert torch.equal(row, sketch_row(values, KEYS, 4096, offset=77))
    assert error(row, sketch_torch.flat_sketch(values, 77, KEYS, 4096).cpu()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter's process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_passes_the_same_tests_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_sketch.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 60


@pytest.mark.skipif(not INTERPRETED, reason="looks into the interpreter's process")
def test_the_interpreter_really_runs_the_kernel(monkeypatch):
    from driftscope.kernels import sketch_triton

    called = []
    real = sketch_triton.flat_sketch
    monkeypatch.setattr(sketch_triton, "flat_sketch", lambda *a: called.append(1) or real(*a))
    sketch_row(torch.ones(100), KEYS, 64)
    assert called
