"""Run by the test beside it, in two processes: a real trainer with Driftscope attached."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from driftscope.hooks import probe
from driftscope.hooks.scope import attach
from tests.hooks.runs import trainer


def main(directory: Path, fail_on: int) -> None:
    rank = int(os.environ["RANK"])
    with trainer(directory / f"rank{rank}", reset=False, use_vllm=False, loss_type="dapo") as made:
        if rank == fail_on:

            def broken(*_: Any, **__: Any) -> Any:
                raise RuntimeError("broken on purpose")

            probe.reference_algebra = broken
        scope = attach(made, directory / "run", spectrum_every=1, deep_every=1, console=False, report=False)
        made.train()
        assert made.state.global_step == 2
        assert set(scope.guard.off) == ({"reference"} if rank == fail_on else set()), scope.guard.off
        scope.detach()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
