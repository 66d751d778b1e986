"""Watch a GRPO run by a callback alone. Runs on a CPU in seconds: python examples/callback_only.py [RUN_DIR]."""

from __future__ import annotations

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from driftscope.hooks import DriftscopeCallback
from driftscope.hooks.tiny import tiny_model, tiny_tokenizer


def even_words(completions: list[str], **_: object) -> list[float]:
    """Reward: the number of words with an even number."""
    return [float(sum(word[-1] in "02468" for word in completion.split())) for completion in completions]


def main(run_dir: str = "runs/callback") -> None:
    """Your trainer as it is, with one more callback."""
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=even_words,
        args=GRPOConfig(
            output_dir=f"{run_dir}/trainer",
            max_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=12,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]}),
        processing_class=tiny_tokenizer(),
        callbacks=[DriftscopeCallback(run_dir=run_dir, spectrum_every=1)],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
