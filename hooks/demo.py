"""The demo: a real, unmodified GRPO trainer on a tiny model on the CPU, watched by Driftscope.

Only the sampling engine is a stand-in (``driftscope.hooks.sampler``). It truncates at ``top_p`` and returns log-probs
renormalised over what it kept, as vLLM does; TRL's own code makes the importance sampling ratio of them: about
``top_p`` a token, and with the default sequence_mask mode its power by the 18 to 28 policy tokens of an episode.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from driftscope.errors import UsageError
from driftscope.hooks.sampler import stand_in_engine
from driftscope.hooks.tiny import save_tiny, tiny_tokenizer

Live = Literal["liger", "reference"]
Mode = Literal["watch", "correct"]
PROMPTS = 64
# Liger's kernels for the model itself are Triton and need a GPU; its chunked GRPO loss is plain PyTorch.
NO_TRITON = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False)
UPSTREAM = r"(torch|transformers|trl|liger_kernel|accelerate|peft)\b"  # whose warnings the demo keeps to itself


def run_demo(
    out: Path, steps: int = 40, seed: int = 0, live: Live = "liger", top_p: float = 0.8, mode: Mode = "watch"
) -> Path:
    """Train with Driftscope attached and leave run.json, records.jsonl and report.html in ``out``; returns ``out``.

    live: the loss that trains, Liger's fused one or TRL's own. top_p: sampling support; 1 keeps the whole vocabulary.
    mode: ``correct`` trains on the corrected loss instead, whatever ``live`` says.
    Raises ``UsageError`` for a value outside its domain, and where the installed TRL has no Liger loss.
    """
    _check(steps, live, top_p)
    for name in ("run.json", "records.jsonl", "report.html"):  # of an earlier demo
        (out / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="driftscope-demo-") as scratch, quiet(), stand_in_engine(seed=seed):
        trainer = build_trainer(Path(scratch), steps=steps, seed=seed, live=live, top_p=top_p)

        import driftscope

        scope = driftscope.attach(trainer, run_dir=out, mode=mode, spectrum_every=1, deep_every=max(1, steps // 8))
        try:
            trainer.train()
        finally:
            scope.detach()
    return out


def build_trainer(
    directory: Path,
    *,
    steps: int = 40,
    seed: int = 0,
    live: Live = "liger",
    top_p: float = 0.8,
    callbacks: list[Any] | None = None,
    **overrides: Any,
) -> Any:
    """The demo's trainer, to be built and trained inside ``stand_in_engine()``.

    directory: where the tiny model is written, for the engine to load. overrides: fields of ``GRPOConfig``.
    """
    _check(steps, live, top_p)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import GRPOConfig

    from driftscope.hooks.environment import ToolEnvironmentTrainer, lookup

    if live == "liger" and not hasattr(ToolEnvironmentTrainer, "compute_liger_loss"):
        import trl

        raise UsageError(
            f"live='liger': TRL {trl.__version__} has no Liger loss; 1.14 replaced it by a fused LM head. Use "
            "live='reference', or run the demo with TRL 0.27.2 and Liger 0.6.5."
        )
    model_path = str(save_tiny(directory / "model", "qwen2", seed))
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "trainer"),
        "max_steps": steps,
        "seed": seed,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": 28,
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": 1.0,
        "top_p": top_p,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "generation_kwargs": {"ignore_eos": True},  # the environment ends the episodes
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if live == "liger":
        arguments |= {"use_liger_kernel": True, "liger_kernel_config": NO_TRITON}
    trainer = ToolEnvironmentTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=even_words,
        args=GRPOConfig(**arguments | overrides),
        train_dataset=Dataset.from_dict({"prompt": prompts()}),
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
    )
    trainer.tools = [lookup]  # after construction: TRL 0.27.2 refuses the argument under transformers 4
    trainer.remove_callback(PrinterCallback)
    if live == "liger":
        trainer.liger_grpo_loss.compiled = False
    return trainer


def prompts(count: int = PROMPTS) -> list[str]:
    """Prompts of 4 to 10 words, so that batches are padded on the left."""
    return [" ".join(f"w{(11 * i + 7 * j) % 500}" for j in range(4 + i % 7)) for i in range(count)]


def even_words(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of words with an even number."""
    rewards = []
    for completion in completions:
        numbers = [int(word[1:]) for word in completion.split() if word[1:].isdigit()]
        rewards.append(sum(n % 2 == 0 for n in numbers) / max(len(numbers), 1))
    return rewards


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the training stack's warnings, log lines and progress bars off the console, inside only."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    trl_level = logging.getLogger("trl").level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning, UserWarning):
                warnings.filterwarnings("ignore", category=category, module=UPSTREAM)
            yield
    finally:
        logging.getLogger("trl").setLevel(trl_level)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _check(steps: int, live: str, top_p: float) -> None:
    if steps < 1:
        raise UsageError(f"steps={steps}: the demo trains for at least one step.")
    if live not in get_args(Live):
        raise UsageError(f"live={live!r} is not a loss path that can train; use 'liger' or 'reference'.")
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p} is a share of probability mass; use a value in (0, 1].")
