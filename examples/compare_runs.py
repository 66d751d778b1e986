"""Train twice, one setting changed, and compare: python examples/compare_runs.py [DIR]. CPU, seconds."""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from driftscope.comparison import Comparison, compare, load
from driftscope.dashboards.compare import render_compare
from driftscope.dashboards.compare_text import show
from driftscope.hooks import DriftscopeCallback
from driftscope.hooks.tiny import tiny_model, tiny_tokenizer


def even_words(completions: list[str], **_: object) -> list[float]:
    """Reward: the number of words with an even number."""
    return [float(sum(word[-1] in "02468" for word in completion.split())) for completion in completions]


def train(run_dir: Path, scale_rewards: str) -> None:
    """One run; ``scale_rewards`` is the setting under test."""
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=even_words,
        args=GRPOConfig(
            output_dir=f"{run_dir}/trainer",
            scale_rewards=scale_rewards,
            max_steps=10,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=12,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(48)]}),
        processing_class=tiny_tokenizer(),
        callbacks=[DriftscopeCallback(run_dir=run_dir, spectrum_every=1, console=False, report=False)],
    )
    trainer.train()


def main(directory: str = "runs/compare") -> Comparison:
    """The same as ``driftscope compare DIR/group DIR/none --html DIR/comparison.html``."""
    runs = [Path(directory) / setting for setting in ("group", "none")]
    for run in runs:
        train(run, run.name)
    comparison = compare([load(run) for run in runs])
    show(comparison)
    render_compare(comparison, Path(directory) / "comparison.html")
    return comparison


if __name__ == "__main__":
    main(*sys.argv[1:])
