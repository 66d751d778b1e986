"""A line to the other ranks that nobody has closed is left before the interpreter goes."""

from __future__ import annotations

from pathlib import Path

from tests.two_ranks import outputs

RANK = """
import atexit, sys, time
from pathlib import Path
from types import SimpleNamespace

def threads():
    time.sleep(0.3)  # a thread is named once it runs
    return sum("gloo_runloop" in task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())

@atexit.register  # before Driftscope's own, so it runs after it
def at_exit():
    print("at exit", threads() - before, flush=True)

import torch
import torch.distributed as dist
from driftscope.hooks.ranks import Ranks
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
dist.barrier()
before = threads()
ranks = Ranks(SimpleNamespace(process_index=rank, num_processes=2), lambda stage, why: print(stage, why))
ranks.connect(7)
_, sums = ranks.exchange([1.0], torch.ones(3, dtype=torch.float64))
assert sums.tolist() == [2.0] * 3 and ranks.open
ranks.close()
assert threads() == before
ranks.connect(7)  # the same trainer trains again
assert ranks.exchange([1.0], torch.ones(3, dtype=torch.float64))[1].tolist() == [2.0] * 3
print("in the run", threads() - before, flush=True)
"""


def test_a_line_left_open_ends_before_the_interpreter(tmp_path: Path) -> None:
    for printed in outputs(RANK, tmp_path / "store"):
        assert printed.splitlines() == ["in the run 2", "at exit 0"]
