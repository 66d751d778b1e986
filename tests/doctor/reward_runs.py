"""Real RewardTrainers on tiny reward models, for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import RewardConfig, RewardTrainer

from driftscope.hooks.tiny import tiny_reward_model, tiny_tokenizer
from tests.hooks.runs import reset_accelerate


def pairs(count: int = 8) -> Dataset:
    """Pairs of uneven length: the chosen text ends in w1 w2, the rejected one in w3."""
    texts = [" ".join(f"w{(7 * i + 3 * j) % 50 + 10}" for j in range(i % 4 + 1)) for i in range(count)]
    return Dataset.from_dict({"chosen": [f"{t} w1 w2" for t in texts], "rejected": [f"{t} w3" for t in texts]})


@contextmanager
def reward_trainer(
    directory: Path,
    model: Any = None,
    *,
    arch: str = "qwen2",
    peft_config: Any = None,
    tokenizer: Any = None,
    dataset: Any = None,
    data_collator: Any = None,
    **overrides: Any,
) -> Iterator[Any]:
    """A RewardTrainer on a tiny reward model, or on the one given. ``overrides``: fields of RewardConfig."""
    reset_accelerate()
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "trainer"),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    } | overrides
    try:
        made = RewardTrainer(
            model=tiny_reward_model(arch) if model is None else model,
            args=RewardConfig(**arguments),
            train_dataset=pairs() if dataset is None else dataset,
            processing_class=tiny_tokenizer() if tokenizer is None else tokenizer,
            data_collator=data_collator,
            peft_config=peft_config,
        )
        made.remove_callback(PrinterCallback)
        yield made
    finally:
        reset_accelerate()
