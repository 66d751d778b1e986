"""A real vLLM engine under TRL's colocate mode, as ``stand_in_engine`` is a stand-in one: same arguments, same use.

On a GPU nothing is changed but what is asked for (dtype, stale weights). vLLM's CPU build needs its recipe: its Linear
layers keep their weights, so that TRL's weight sync reaches them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.hooks.sampler import ENGINE_MODULES, RENDEZVOUS, EngineSettings

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextmanager
def real_engine(
    *, dtype: torch.dtype | None = None, stale: bool | Sequence[str] = False, seed: int | None = None
) -> Iterator[list[Any]]:
    """Let TRL build a real ``vllm.LLM`` with this dtype; yields the engines built inside.

    dtype: what the engine computes in; ``None`` is the checkpoint's own (vLLM's "auto" would make bfloat16 of
    float32). stale, seed: as in ``EngineSettings``. Build the trainer *and* train inside: the engines are shut down on
    leaving, with vLLM's process groups, so that the next one finds none.
    Raises UsageError where vLLM is not installed.
    """
    settings = EngineSettings(dtype=dtype, stale=stale, seed=seed)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {**ENVIRONMENT, **os.environ}))
        vllm = _vllm()
        stack.enter_context(_without_rendezvous())
        if not torch.cuda.is_available():
            stack.enter_context(_weights_kept())
        engines: list[Any] = []
        build = _builder(vllm.LLM, settings, engines)
        for name in ("vllm", *ENGINE_MODULES):
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is None or not name.startswith(error.name):
                    raise
                continue
            if hasattr(module, "LLM"):
                stack.enter_context(patch.object(module, "LLM", build))
        stack.callback(_shut_down, engines)
        yield engines


def import_trl() -> Any:
    """TRL, also one from before 1.0 under transformers 5.

    That one reads transformers' package check as a truth value, and transformers 5 returns a pair; so every optional
    package would look installed. Only while TRL is imported does the check answer with the first of the pair.
    """
    checks = importlib.import_module("transformers.utils.import_utils")
    check = checks._is_package_available

    def first(name: str, return_version: bool = False) -> Any:
        answer = check(name, return_version=return_version)
        return answer[0] if isinstance(answer, tuple) and not return_version else answer

    with patch.object(checks, "_is_package_available", first):
        importlib.import_module("trl.import_utils")
    return importlib.import_module("trl")


def _vllm() -> Any:
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UsageError(
            "vLLM is not installed here, so there is no real engine to sample with. Install vllm (a GPU), or use the "
            "stand-in engine: driftscope.hooks.sampler.stand_in_engine."
        ) from error


def _builder(llm: Callable[..., Any], settings: EngineSettings, engines: list[Any]) -> Callable[..., Any]:
    """``vllm.LLM`` with the settings' dtype and seed, whose weight syncs lose what the settings say."""

    def build(*args: Any, **kwargs: Any) -> Any:
        path = kwargs["model"] if "model" in kwargs else args[0]
        kwargs["dtype"] = _dtype_name(settings.dtype, str(path))
        kwargs["enforce_eager"] = True
        if settings.seed is not None:
            kwargs["seed"] = settings.seed
        engine = llm(*args, **kwargs)
        if settings.stale:
            _lose_weights(engine, settings)
        engines.append(engine)
        return engine

    return build


def _dtype_name(dtype: torch.dtype | None, path: str) -> str:
    """vLLM's name of a dtype; the checkpoint's own where none is asked for."""
    if dtype is None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        dtype = getattr(config, "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")


def _shut_down(engines: list[Any]) -> None:
    """End the engines now: one that is collected later would take the process groups of its successor with it."""
    for engine in engines:
        core = getattr(engine.llm_engine, "engine_core", None)
        if core is not None:
            core.shutdown()
    if engines:
        importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()


def _lose_weights(engine: Any, settings: EngineSettings) -> None:
    """Wrap the engine's own ``load_weights``."""
    model = engine.llm_engine.model_executor.driver_worker.model_runner.model
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
        return load((name, tensor) for name, tensor in weights if not settings.ignores(name))

    model.load_weights = load_weights


@contextmanager
def _weights_kept() -> Iterator[None]:
    """Keep vLLM's CPU backend from repacking Linear weights: the originals would be gone, or left stale."""
    layers = importlib.import_module("vllm.model_executor.layers.utils")

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with patch.object(layers, "dispatch_cpu_unquantized_gemm", keep):
        yield


@contextmanager
def _without_rendezvous() -> Iterator[None]:
    """The environment variables of the engine's process group, as they were before."""
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
