"""Run by the test beside it, in two processes: trainings one after another, each with a function broken on rank 1.

Prints a line of JSON for each: what was broken, the steps that were trained, the seconds, the stages that are off.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from driftscope.hooks.scope import attach
from driftscope.hooks.tiny import save_tiny, words
from tests.distributed.batches import fixed_completions, fixed_order, injected_ratio
from tests.distributed.worker import leave
from tests.faults.stages import break_it
from tests.hooks.runs import trainer


def one(directory: Path, label: str, place: str, deep: bool) -> None:
    rank = int(os.environ["RANK"])
    broken = pytest.MonkeyPatch()
    mode = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "top_p": 0.8, "ddp_timeout": 60}
    with trainer(directory / f"rank{rank}", reset=False, **mode) as made:
        fixed_completions(made, processes=1, words=words(512))
        fixed_order(made, processes=1)
        injected_ratio(made, 0.5)
        calls = break_it(broken, place) if rank == 1 else [1]
        begun = time.monotonic()
        try:
            scope = attach(
                made, directory / "run", spectrum_every=1, deep_every=int(deep), console=False, report=rank == 1
            )
            made.train()
            scope.detach()
        finally:
            broken.undo()
        weights = [p.detach().double().sum() for p in made.model.parameters()]
        off = dict(scope.guard.off)
        if scope.together.ranks.why:
            off["line"] = scope.together.ranks.why
        told = {
            "label": label, "rank": rank, "calls": len(calls), "steps": made.state.global_step,
            "seconds": time.monotonic() - begun, "off": off, "weights": float(torch.stack(weights).sum()),
        }  # fmt: skip
    print(json.dumps(told), flush=True)


def main(directory: Path, places: dict[str, str]) -> None:
    for number in range(len(places)):  # before there is a process group, in which only one rank would save its own
        save_tiny(directory / str(number) / f"rank{os.environ['RANK']}" / "model", "qwen2", 0)
    for number, (label, place) in enumerate(places.items()):
        one(directory / str(number), label, place, deep=True)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
