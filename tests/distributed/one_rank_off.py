"""Run by the test beside it, in two processes: trainings in which the ranks are not alike, one after another."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from driftscope.hooks.scope import attach
from driftscope.hooks.tiny import save_tiny, words
from tests.distributed.batches import fixed_completions, fixed_order, injected_ratio
from tests.distributed.worker import leave
from tests.hooks.runs import trainer

SLEEP_S = 0.05
STEPS = {"slow": 12, "stop": 6}


def honest(made: Any, rank: int) -> None:
    """Nothing is wrong."""


def ratio(made: Any, rank: int) -> None:
    """The engine of rank 1 has missed its weight updates: all of its ratios are half of what they should be."""
    own = made._generate_and_score_completions

    def generate(inputs: Any) -> Any:
        batch = own(inputs)
        if rank == 1:
            batch["sampling_per_token_logps"] = batch["sampling_per_token_logps"] + torch.log(torch.tensor(2.0))
            batch["importance_sampling_ratio"] = batch["importance_sampling_ratio"] / 2
        return batch

    made._generate_and_score_completions = generate


def normalizer(made: Any, rank: int) -> None:
    """The live loss divides by what its own rank holds: right in one process, wrong on several."""
    own, world = made.compute_loss, dist.get_world_size()

    def loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mine = inputs["completion_mask"].sum().float()
        everyone = mine.clone()
        dist.all_reduce(everyone)
        return own(model, inputs, *args, **kwargs) * everyone / world / mine

    made.compute_loss = loss


def slow(made: Any, rank: int) -> None:
    """Rank 1's forward takes longer, step after step."""
    if rank == 1:
        made.model.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))


def stop(made: Any, rank: int) -> None:
    """The ratio of every rank is critical, and the run is to end on that."""
    own = made._generate_and_score_completions

    def generate(inputs: Any) -> Any:
        batch = own(inputs)
        batch["sampling_per_token_logps"] = batch["sampling_per_token_logps"] + 4.0
        batch["importance_sampling_ratio"] = batch["importance_sampling_ratio"] * torch.exp(torch.tensor(-4.0))
        return batch

    made._generate_and_score_completions = generate


VARIANTS = {f.__name__: f for f in (honest, ratio, normalizer, slow, stop)}


def one(directory: Path, name: str) -> None:
    rank = int(os.environ["RANK"])
    mode = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "ddp_timeout": 60}
    mode |= {"max_steps": STEPS.get(name, 2), "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    with trainer(directory / f"rank{rank}", reset=False, **mode) as made:
        fixed_completions(made, processes=1, words=words(512))
        fixed_order(made, processes=1)
        injected_ratio(made, 0.1)
        VARIANTS[name](made, rank)
        settings = {"canary_tokens": 0, "console": False, "report": False, "deep_every": 0}
        settings |= {"on_divergence": "stop" if name == "stop" else "warn", "rank_journals": name == "honest"}
        scope = attach(made, directory / "run", spectrum_every=1, **settings)
        made.train()
        scope.detach()
        told = {"name": name, "rank": rank, "steps": made.state.global_step, "off": scope.guard.off}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    for variant in VARIANTS:  # before there is a process group, in which only one rank would save its own
        save_tiny(Path(sys.argv[1]) / variant / f"rank{os.environ['RANK']}" / "model", "qwen2", 0)
    for variant in VARIANTS:
        one(Path(sys.argv[1]) / variant, variant)
    leave()
