"""Run by the test beside it, in two processes: DDP with gradients sketched on both ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from driftscope.hooks.scope import attach
from tests.hooks.runs import steps_of, trainer

SETTINGS: dict[str, Any] = {
    "spectrum_every": 1,
    "deep_every": 1,
    "console": False,
    "report": False,
    "max_overhead": 0.0,
}


def main(directory: Path, how: str) -> None:
    """how: ``bare``, ``attached``, or ``broken`` (the rerun fails on rank 1)."""
    rank = int(os.environ["RANK"])
    options: dict[str, Any] = {"model_config": {"attention_dropout": 0.2}, "max_steps": 3}
    with trainer(directory / f"rank{rank}", reset=False, **options) as made:
        scope = attach(made, directory / "run", **SETTINGS) if how != "bare" else None
        if scope is not None and how == "broken" and rank == 1:
            scope.probe.deep.add = fails
        made.train()
        assert type(made.model_wrapped).__name__ == "DistributedDataParallel"
        if scope is not None:
            assert set(scope.guard.off) == ({"param_norm"} if scope.probe.deep.add is fails else set()), (
                scope.guard.off
            )
            scope.detach()
        torch.save(made.model.state_dict(), directory / f"{how}-{rank}.pt")
    torch.distributed.barrier()
    if scope is not None and rank == 0:
        found = [r.model_dump(mode="json") for r in steps_of(directory / "run")]
        (directory / f"{how}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


def fails(*_: Any) -> None:
    raise RuntimeError("broken on purpose")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
