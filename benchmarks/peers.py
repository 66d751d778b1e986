"""Other people's fused heads on the benchmark's problem: Liger-Kernel, TRL, cut-cross-entropy.

Each is imported where it is found: installed, or unpacked in a folder named by DRIFTSCOPE_PEERS as
``<folder>/liger-0.6.5``, ``<folder>/liger-0.8.5``, ``<folder>/trl`` and ``<folder>/cce`` (wheels, unpacked with their
.dist-info). A peer that is not there is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

from driftscope.bench.paths import Entry
from driftscope.bench.problem import Problem, policy_loss

TRL_VOCABULARY_CHUNK = 32768  # as TRL 1.16 calls it


def peers(problem: Problem) -> list[Entry]:
    """Every peer that can be imported."""
    folder = Path(os.environ.get("DRIFTSCOPE_PEERS", "peers"))
    entries = []
    for maker in (_trl, _liger_old, _liger_new, _cce):
        try:
            entries += maker(problem, folder)
        except ImportError as error:
            print(f"left out: {maker.__name__.strip('_')}: {error}", file=sys.stderr)
    return entries


def versions() -> dict[str, str]:
    """What stands in each folder, from the metadata beside the package, else the installed version."""
    folder = Path(os.environ.get("DRIFTSCOPE_PEERS", "peers"))
    found = {}
    for name, package in (("liger-0.6.5", ""), ("liger-0.8.5", ""), ("trl", "trl"), ("cce", "cut-cross-entropy")):
        unpacked = next((folder / name).glob("*.dist-info"), None)
        if unpacked is not None:
            found[name] = unpacked.name.removesuffix(".dist-info")
        elif package:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = f"{package}-{importlib.metadata.version(package)}"
    return found


def _import(module: str, folder: Path):
    """A module from a folder where that exists, else the installed one."""
    package = module.split(".")[0]
    for name in [m for m in sys.modules if m.split(".")[0] == package]:
        del sys.modules[name]
    if folder.is_dir():
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module)
    finally:
        if folder.is_dir():
            sys.path.remove(str(folder))


def _trl(problem: Problem, folder: Path) -> list[Entry]:
    """TRL's fused head with log-probs and entropies, on the tokens that are no padding, and its algebra on top."""
    function = _import("trl.kernels.chunked_logprob", folder / "trl").ChunkedLogProbFunction
    if importlib.util.find_spec("datasets") is None and "trl.trainer.utils" not in sys.modules:
        # Without the trainer's dependencies: what the backward takes from the trainer is a null context here.
        stand_in = types.ModuleType("trl.trainer.utils")
        stand_in.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
        sys.modules["trl.trainer.utils"] = stand_in
    keep = problem.batch.completion_mask_BT.reshape(-1) != 0
    targets = problem.targets_BT.reshape(-1)

    def path(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logps = function.apply(
            hidden[keep], weight, None, targets[keep], 1.0, TRL_VOCABULARY_CHUNK, None, 1.0, ("entropy",)
        )[0]
        return policy_loss(problem, logps.new_zeros(keep.shape).masked_scatter(keep, logps))

    return [Entry("TRL fused head", path)]


def _liger(problem: Problem, folder: Path, name: str, *, whole: bool) -> list[Entry]:
    loss_class = _import("liger_kernel.chunked_loss.grpo_loss", folder).LigerFusedLinearGRPOLoss
    loss = loss_class(beta=0.0, compiled=True, use_ref_model=False, loss_type="dapo", temperature=1.0)
    batch = problem.batch
    extra = {}
    if whole:
        items = torch.tensor(batch.num_items_in_batch, device=batch.advantages.device)
        extra = {"vllm_is_ratio": batch.is_ratio, "num_items_in_batch": items}

    fresh = [True]

    def path(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if fresh and fresh.pop():
            torch.compiler.reset()  # what was compiled for another version or size
        hidden_BTD = hidden.view(*problem.targets_BT.shape, -1)
        mask = batch.completion_mask_BT
        return loss(hidden_BTD, weight, problem.targets_BT, mask, batch.advantages, **extra)[0]

    return [Entry(name, path, "" if whole else "takes no importance sampling ratio")]


def _liger_old(problem: Problem, folder: Path) -> list[Entry]:
    if not (folder / "liger-0.6.5").is_dir():
        raise ImportError("no folder liger-0.6.5")
    return _liger(problem, folder / "liger-0.6.5", "Liger 0.6.5", whole=False)


def _liger_new(problem: Problem, folder: Path) -> list[Entry]:
    if not (folder / "liger-0.8.5").is_dir():
        raise ImportError("no folder liger-0.8.5")
    return _liger(problem, folder / "liger-0.8.5", "Liger 0.8.5", whole=True)


def _cce(problem: Problem, folder: Path) -> list[Entry]:
    linear_cross_entropy = _import("cut_cross_entropy", folder / "cce").linear_cross_entropy
    keep = problem.batch.completion_mask_BT.reshape(-1) != 0
    targets = problem.targets_BT.reshape(-1).masked_fill(~keep, -100)

    def path(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return policy_loss(problem, -linear_cross_entropy(hidden, weight, targets, reduction="none"))

    return [Entry("cut-cross-entropy", path, "no entropies; skips small gradients")]
