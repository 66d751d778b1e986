"""The trainer that the overhead benchmarks watch: a real GRPOTrainer on a random model of a real model's shape.

Completions are random tokens: no time is spent on generation, so shares of the step time are upper bounds.
Shared by overhead.py and sampling.py.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from driftscope.hooks.tiny import tiny_tokenizer

SHAPES: dict[str, dict[str, int]] = {
    # layers, hidden size, heads and key-value heads, inner size: those of Qwen2.5
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 128, "vocabulary": 512},
    "0.5b": {"layers": 24, "hidden": 896, "heads": 14, "kv_heads": 2, "inner": 4864, "vocabulary": 151936},
    "1.5b": {"layers": 28, "hidden": 1536, "heads": 12, "kv_heads": 2, "inner": 8960, "vocabulary": 151936},
    "3b": {"layers": 36, "hidden": 2048, "heads": 16, "kv_heads": 2, "inner": 11008, "vocabulary": 151936},
}
WORDS = 500  # completions are made of the tokenizer's plain words
LORA_RANK = 16


class Clock(TrainerCallback):
    """Wall time from the begin of an optimizer step to the begin of the next, the device idle at both ends.

    So what callbacks do at a step's end is in it. The last step of a block has no next one and is left out.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._begun: float | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        begun, self._begun = self._begun, now()
        if begun is not None:
            self.ms.append((self._begun - begun) * 1e3)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun = None


def now() -> float:
    """Seconds, with the device idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def processes() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process tells."""
    return int(os.environ.get("RANK", "0")) == 0


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that the overhead benchmarks share: Qwen2.5-0.5B's shape by default."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result there too")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b", help="of the model (default: 0.5b)")
    for name in ("layers", "hidden", "heads", "kv-heads", "inner", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="instead of the shape's")
    parser.add_argument("--tokens", type=int, default=1024, help="longest completion")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch, per process")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--lora", action="store_true", help=f"train a LoRA adapter of rank {LORA_RANK} on q and v")
    parser.add_argument("--liger", action="store_true", help="use_liger_kernel, where this TRL has it")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model over the processes; the rest is DDP")
    parser.add_argument("--cpu", action="store_true")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return parser


def shape(args: argparse.Namespace) -> dict[str, int]:
    """The model's shape: the named one, with what was given instead."""
    given = {name: getattr(args, name, None) for name in SHAPES["0.5b"]}
    return {**SHAPES[args.shape], **{name: value for name, value in given.items() if value is not None}}


def build(args: argparse.Namespace, directory: str, *, even: bool = False) -> tuple[Any, Clock]:
    """A trainer whose completions are random tokens, of uneven length or (``even``) all of the longest."""
    torch.manual_seed(0)
    clock = Clock()
    trainer = GRPOTrainer(
        model=_model(args),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text[:8])) % 7) for text in completions],
        args=_settings(args, directory),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(400)]}),
        processing_class=tiny_tokenizer(),
        callbacks=[clock],
        peft_config=_lora() if args.lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if args.cpu and hasattr(trainer, "liger_grpo_loss"):
        trainer.liger_grpo_loss.compiled = False
    trainer._generate_single_turn = _random_completions(trainer, args.tokens, even)
    return trainer, clock


def _model(args: argparse.Namespace) -> Qwen2ForCausalLM:
    sides = shape(args)
    config = Qwen2Config(
        vocab_size=sides["vocabulary"], hidden_size=sides["hidden"], intermediate_size=sides["inner"],
        num_hidden_layers=sides["layers"], num_attention_heads=sides["heads"],
        num_key_value_heads=sides["kv_heads"], tie_word_embeddings=True, pad_token_id=509, eos_token_id=510,
        bos_token_id=None, max_position_embeddings=32768,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if args.cpu else torch.bfloat16)
    try:
        with torch.device("cpu" if args.cpu else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"):
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _settings(args: argparse.Namespace, directory: str) -> GRPOConfig:
    wanted: dict[str, Any] = {
        "gradient_checkpointing": args.checkpointing and not args.fsdp2,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_liger_kernel": args.liger,
        "ddp_find_unused_parameters": False,
    }
    if args.liger and args.cpu:  # Liger's Triton kernels need a GPU
        wanted["liger_kernel_config"] = dict.fromkeys(
            ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False
        )
    if args.fsdp2:
        wanted |= _fsdp2(args)
    return GRPOConfig(
        output_dir=directory, max_steps=4, per_device_train_batch_size=args.batch, num_generations=args.batch,
        gradient_accumulation_steps=args.accumulation, max_completion_length=args.tokens, bf16=not args.cpu,
        use_cpu=args.cpu, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, learning_rate=1e-6,
        **wanted,
    )  # fmt: skip


def _fsdp2(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of a sharded model; activation checkpointing is then FSDP's own."""
    return {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
            "reshard_after_forward": True,
            "activation_checkpointing": args.checkpointing,
        },
    }


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=["q_proj", "v_proj"])


def _random_completions(trainer: Any, tokens: int, even: bool) -> Callable[..., Any]:
    """A stand-in for generation, in the form that this version of TRL expects."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    older = "prompt_ids" not in inspect.signature(trainer._generate_single_turn).parameters

    def completions(count: int) -> list[list[int]]:
        lengths = torch.randint(tokens // 2, tokens + 1, (count,), generator=generator).tolist()
        return [torch.randint(0, WORDS, (tokens if even else n,), generator=generator).tolist() for n in lengths]

    def with_prompt_ids(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return completions(len(prompt_ids)), None

    def with_prompts(prompts: list[str]) -> tuple[list[list[int]], list[list[int]], None, dict[str, Any]]:
        return trainer.processing_class(prompts)["input_ids"], completions(len(prompts)), None, {}

    return with_prompts if older else with_prompt_ids


def stack() -> dict[str, str]:
    """Versions of what the step time depends on."""
    out = {}
    for name in ("torch", "trl", "transformers", "liger-kernel", "accelerate", "peft"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def device(args: argparse.Namespace) -> str:
    """The device's name; the processor's kind without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() and not args.cpu else platform.machine()


def write(args: argparse.Namespace, found: dict[str, Any]) -> str:
    """A result with device, versions and settings as JSON, written where it was asked for. Rank 0 alone writes."""
    result = {
        "device": device(args),
        "processes": processes(),
        "versions": stack(),
        "settings": {k: v for k, v in vars(args).items() if k != "out" and v is not None},
        **found,
    }
    text = json.dumps(result, indent=2)
    if args.out is not None and is_main():
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return text


def tell(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print a result with device, versions and settings, and write it where it was asked for."""
    text = write(args, found)
    if is_main():
        print(text)
