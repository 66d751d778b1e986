"""Real trainers for the tests: the installed TRL and Liger on tiny models, with the stand-in sampling engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from packaging.version import Version
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from driftscope.hooks.demo import even_words, prompts
from driftscope.hooks.sampler import stand_in_engine
from driftscope.hooks.tiny import save_tiny, tiny_tokenizer

HAS_LIGER_LOSS = hasattr(GRPOTrainer, "compute_liger_loss")
IS_SEED_STACK = Version(trl.__version__) < Version("0.28")
NO_TRITON = dict.fromkeys(
    ("rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"), False
)


def reset_accelerate() -> None:
    """Forget the mixed precision of an earlier trainer: accelerate keeps it for the process."""
    for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@contextmanager
def trainer(
    directory: Path,
    *,
    liger: bool = False,
    arch: str = "qwen2",
    model_config: dict[str, Any] | None = None,
    seed: int = 0,
    wrap: Any = None,
    trainer_class: Any = GRPOTrainer,
    reward: Any = even_words,
    tools: bool = False,
    callbacks: list[Any] | None = None,
    dtype: torch.dtype | None = None,
    reset: bool = True,
    **overrides: Any,
) -> Iterator[Any]:
    """A GRPO trainer in an environment with the stand-in engine; train inside.

    ``wrap``: model -> model, for PEFT. ``overrides``: fields of GRPOConfig.
    """
    if reset:
        reset_accelerate()
    path = str(save_tiny(directory / "model", arch, seed, **(model_config or {})))
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "trainer"),
        "max_steps": 2,
        "seed": seed + 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "loss_type": "dapo",
        "beta": 0.0,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    } | overrides
    if liger:
        arguments |= {"use_liger_kernel": True, "liger_kernel_config": NO_TRITON}
    with stand_in_engine(seed=seed):
        model = AutoModelForCausalLM.from_pretrained(path, **({"dtype": dtype} if dtype else {}))
        made = trainer_class(
            model=wrap(model) if wrap is not None else model,
            reward_funcs=reward,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
            processing_class=tiny_tokenizer((model_config or {}).get("vocab", 512)),
            callbacks=callbacks,
        )
        made.remove_callback(PrinterCallback)
        if hasattr(made, "liger_grpo_loss"):
            made.liger_grpo_loss.compiled = False
        if tools:
            made.tools = [len]
        try:
            yield made
        finally:
            if reset:
                reset_accelerate()


def even_lengths(made: Any) -> None:
    """Let the engine ignore the end of sequence, so that every completion has the full length."""
    generation = getattr(made, "vllm_generation", None)
    if generation is not None:
        generation.generation_kwargs = {"ignore_eos": True}
    else:
        made.args.generation_kwargs = {"ignore_eos": True}


def steps_of(run_dir: Path) -> list[Any]:
    """The step records of a run."""
    from driftscope.journal import read_run

    return list(read_run(run_dir).steps)


def alerts_of(run_dir: Path) -> list[Any]:
    """The alerts of a run."""
    from driftscope.journal import read_run

    return list(read_run(run_dir).alerts)


def notes_of(run_dir: Path) -> list[Any]:
    """The notes of a run."""
    from driftscope.journal import read_run

    return list(read_run(run_dir).notes)
