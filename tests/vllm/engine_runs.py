"""Short real runs: TRL's own trainer with a real vLLM engine, Driftscope attached."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs a real vLLM engine: make test-vllm builds an environment"
)
# vLLM and its dependencies warn a lot, and none of it is about this project.
quiet_upstream = pytest.mark.filterwarnings("ignore")
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # vLLM's CPU attention takes heads of 32 and more


@dataclass(frozen=True)
class Seen:
    """What a run left behind."""

    records: list[Any]
    rules: set[str]
    trainer: Any

    @property
    def first_causes(self) -> list[str]:
        """The cause that is named first, look by look."""
        return [r.is_ratio.causes[0].id for r in self.records]


def lora(model: Any) -> Any:
    """The model with adapters on every linear layer of the trunk."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def engine_run(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    stale: bool | list[str] = False,
    seed: int = 0,
    arch: str = "llama",
    wrap: Any = None,
    steps: int = 3,
    **overrides: Any,
) -> Seen:
    """Train a few steps. dtype, stale: the engine's."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    import driftscope
    from driftscope.hooks.demo import even_words, prompts, quiet
    from driftscope.hooks.real_engine import real_engine
    from driftscope.hooks.tiny import save_tiny, tiny_tokenizer
    from tests.hooks.runs import alerts_of, reset_accelerate, steps_of

    reset_accelerate()
    path = str(save_tiny(directory / "model", arch, seed, **HEADS))
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "trainer"), "max_steps": steps, "seed": seed + 1, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "per_device_train_batch_size": 8, "num_generations": 4,
        "gradient_accumulation_steps": 1, "max_completion_length": 32, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_max_model_length": 256, "vllm_importance_sampling_mode": "token_truncate", "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True,
    } | overrides  # fmt: skip
    with quiet(), real_engine(dtype=dtype, stale=stale, seed=seed) as engines:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=wrap(model) if wrap is not None else model,
            reward_funcs=even_words,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
            processing_class=tiny_tokenizer(),
        )
        assert len(engines) == 1
        assert type(engines[0]).__module__.startswith("vllm.")  # the real one
        with driftscope.attach(
            trainer, directory / "run", spectrum_every=1, deep_every=0, console=False, report=False
        ):
            trainer.train()
    reset_accelerate()
    records = [r for r in steps_of(directory / "run") if r.canary is not None]
    return Seen(records, {a.rule for a in alerts_of(directory / "run") if a.severity != "info"}, trainer)
