"""One collective makes one mismatch of all ranks'."""

from __future__ import annotations

import torch

from driftscope.mismatch import measure_mismatch, reduce_ranks
from tests.mismatch import plain
from tests.two_ranks import outputs

RANK = """
import sys, torch
import torch.distributed as dist
from driftscope.mismatch import figures, measure_mismatch, reduce_ranks
from tests.mismatch import plain
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
trainer, engine, mask, _ = plain.batch(6, 20, seed=5)
mine = slice(0, 2) if rank == 0 else slice(2, 6)
whole = figures(measure_mismatch(trainer, engine, mask)).flat()
reduced = figures(reduce_ranks(measure_mismatch(trainer[mine], engine[mine], mask[mine]))).flat()
assert set(whole) == set(reduced)
for name, value in whole.items():
    assert abs(reduced[name] - value) <= 1e-9 * max(abs(value), 1e-3), name
dist.destroy_process_group()
print("same")
"""


def test_without_a_process_group_it_is_itself():
    sums = measure_mismatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3))
    assert reduce_ranks(sums) is sums


def test_two_ranks_get_the_figures_of_the_whole_batch(tmp_path):
    assert plain.batch(6, 20, seed=5)[2][:2].sum() != plain.batch(6, 20, seed=5)[2][2:].sum()
    for printed in outputs(RANK, tmp_path / "store"):
        assert printed.split() == ["same"]
