"""One process of a run, started by ``tests.distributed.launch``: a real trainer, with or without Driftscope."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from driftscope.hooks.scope import Scope, attach
from driftscope.hooks.sharding import sharding
from driftscope.hooks.tiny import words
from tests.distributed.batches import fixed_completions, fixed_order, injected_ratio
from tests.distributed.launch import COLLECTIVE_TIMEOUT_S, SHARDED, Job
from tests.hooks.runs import trainer

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send", "monitored_barrier",
)  # fmt: skip


def deepspeed_config(job: Job) -> dict[str, Any]:
    """ZeRO of the job's stage, with buckets that fit a tiny model; small parameters are partitioned as well."""
    stage: dict[str, Any] = {"stage": int(job.mode[-1])}
    if job.mode == "zero3":
        stage |= {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        **dict.fromkeys((*automatic, "gradient_clipping"), "auto"),
        "zero_optimization": stage,
        "zero_allow_untested_optimizer": True,
    }


def arguments(job: Job) -> dict[str, Any]:
    """Fields of ``GRPOConfig``: the job's over those of its mode."""
    made: dict[str, Any] = {"ddp_timeout": COLLECTIVE_TIMEOUT_S, "max_steps": job.steps, "use_vllm": False}
    made |= {"use_cpu": job.device == "cpu" and job.mode not in SHARDED}
    if job.log_ratio is not None:
        made |= {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    if job.mode.startswith("zero"):
        made |= {"deepspeed": deepspeed_config(job)}
    made |= job.arguments
    if job.mode == "one":
        made["per_device_train_batch_size"] = made.get("per_device_train_batch_size", 4) * job.processes
    return made


def sharding_on_cpu(job: Job) -> None:
    """Tell accelerate that the CPU is an accelerator which talks over gloo: it shards nothing on a CPU by itself."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    kind = DistributedType.MULTI_GPU
    if job.mode.startswith("zero"):
        import deepspeed.ops

        kind = DistributedType.MULTI_CPU
        # Its own shared-memory collectives are compiled at the first use; gloo's do.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState._prepare_backend = lambda *_, **__: ("gloo", kind)


def changed(job: Job) -> Callable[[Any], Any] | None:
    """The change to the model that the job asks for: a bias on its head, or adapters with random weights."""
    if job.lora is None and not job.head_bias:
        return None

    def change(model: Any) -> Any:
        torch.manual_seed(job.seed)
        if job.head_bias:
            head = model.get_output_embeddings()
            head.bias = torch.nn.Parameter(torch.randn(head.weight.shape[0]))
        if job.lora is None:
            return model
        from peft import LoraConfig, get_peft_model

        # A trained bias: transformers gives the optimizer a second group for biases, and DeepSpeed drops an empty one.
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=job.lora,
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            bias="lora_only",
        )
        return get_peft_model(model, config)

    return change


def break_function(spec: str, rank: int) -> None:
    """Let ``module:qualname`` raise, where the rank after the ``@`` is this one."""
    target, _, on = spec.rpartition("@")
    if int(on) != rank:
        return
    module, _, qualname = target.partition(":")
    *path, name = qualname.split(".")
    owner: Any = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, name)  # an unknown name would break nothing

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken on purpose")

    setattr(owner, name, broken)


@contextmanager
def no_collectives() -> Iterator[None]:
    """Inside, a collective of this process raises: c10d's functions, and the operators that DTensor uses."""
    from torch.utils._python_dispatch import TorchDispatchMode

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"a collective ran in the head pass: {name}")

        return refused

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor"):
                refuse(str(func))()
            return func(*args, **(kwargs or {}))

    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in kept:
        setattr(dist, name, refuse(name))
    try:
        with Watch():
            yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def forbid_collectives(scope: Scope) -> None:
    """Let the analysis of this process fail where it enters a collective."""
    assert scope.probe is not None
    analyse = scope.probe.analyse

    def watched(*args: Any, **kwargs: Any) -> Any:
        with no_collectives():
            return analyse(*args, **kwargs)

    scope.probe.analyse = watched  # type: ignore[method-assign]


def after(scope: Scope) -> dict[str, Any]:
    """What the run left in Driftscope: the stages that were switched off, the kind of sharding, an open line."""
    return {"off": scope.guard.off, "sharding": sharding(scope.trainer), "line": scope.together.ranks.open}


def note_restored(scope: Scope, report: dict[str, Any]) -> None:
    """Report whether every analysis leaves the head module, its parameters and hooks the very same objects."""
    assert scope.probe is not None
    analyse, inner = scope.probe.analyse, scope.probe.inner
    report["restored"] = True

    def objects() -> list[Any]:
        head = inner.get_output_embeddings()
        found = [head, *(p for m in head.modules() for p in m._parameters.values())]
        return [*found, *(hook for m in head.modules() for hook in (m._forward_pre_hooks | m._forward_hooks).values())]

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = objects()
        answer = analyse(*args, **kwargs)
        now = objects()
        report["restored"] &= len(now) == len(before) and all(a is b for a, b in zip(before, now, strict=True))
        return answer

    scope.probe.analyse = watched  # type: ignore[method-assign]


def full_weights(made: Any) -> dict[str, torch.Tensor]:
    """All weights, whole, on the host; every process must call it."""
    from torch.distributed.tensor import DTensor

    model = made.accelerator.unwrap_model(made.model)
    named = dict(model.named_parameters())
    split = [p for p in named.values() if hasattr(p, "ds_id")]
    if split:
        import deepspeed

        with deepspeed.zero.GatheredParameters(split):
            return {name: p.detach().cpu().clone() for name, p in named.items()}
    whole = {name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named.items()}
    return {name: value.cpu().clone() for name, value in whole.items()}


def run(job: Job) -> dict[str, Any]:
    """Train; returns this process's report. Rank 0 also writes the weights."""
    rank = int(os.environ.get("RANK", "0"))
    directory = Path(job.directory)
    report: dict[str, Any] = {"rank": rank}
    if job.mode in SHARDED and job.device == "cpu":
        sharding_on_cpu(job)
    stands_for = job.processes if job.mode == "one" else 1
    with trainer(
        directory / f"rank{rank}",
        reset=False,
        liger=job.liger,
        arch=job.arch,
        seed=job.seed,
        model_config=job.model,
        wrap=changed(job),
        **arguments(job),
    ) as made:
        fixed_completions(made, processes=stands_for, words=words(job.model.get("vocab", 512)))
        fixed_order(made, processes=stands_for)
        if job.log_ratio is not None:
            injected_ratio(made, job.log_ratio)
        if job.fail is not None:
            break_function(job.fail, rank)
        scope = None
        if job.attached:
            settings = {"spectrum_every": 1, "deep_every": 0, "console": False, "report": False} | job.settings
            scope = attach(made, job.run_dir, **settings)
            if job.forbid and rank == 0:
                forbid_collectives(scope)
            note_restored(scope, report)
        made.train()
        report |= {"steps": made.state.global_step, "history": made.state.log_history}
        report["rng"] = torch.get_rng_state().sum().item()
        if scope is not None:
            report |= after(scope)
            scope.detach()
        weights = full_weights(made)
        if rank == 0:
            torch.save(weights, directory / "weights.pt")
    return report


def leave() -> None:
    """End the process group once nothing holds it.

    What FSDP2's model holds outlives ``destroy_process_group``; a thread of gloo that still has a tensor in hand when
    the interpreter goes aborts the process, with or without Driftscope (PyTorch 2.13, pull request 179291).
    """
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main(path: Path) -> None:
    job = Job(**json.loads(path.read_text(encoding="utf-8")))
    report = run(job)
    leave()
    target = Path(job.directory) / f"rank{report['rank']}.json"
    target.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
