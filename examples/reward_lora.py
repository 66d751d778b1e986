"""Train a reward model with LoRA so that its head is trained and saved. Runs on a CPU in seconds:
python examples/reward_lora.py [RUN_DIR].
"""

from __future__ import annotations

import random
import sys

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

import driftscope
from driftscope.hooks.tiny import save_tiny, tiny_tokenizer

WORDS = 40


def preferences(seed: int, count: int) -> Dataset:
    """Pairs of texts of four words: the chosen one is of even words, the rejected one of odd words."""
    draw = random.Random(seed)
    texts = {
        side: [" ".join(f"w{draw.randrange(first, WORDS, 2)}" for _ in range(4)) for _ in range(count)]
        for side, first in (("chosen", 0), ("rejected", 1))
    }
    return Dataset.from_dict(texts)


def accuracy(model: torch.nn.Module, pairs: Dataset) -> float:
    """Share of pairs whose chosen text has the higher reward."""
    tokenizer = tiny_tokenizer(64)
    rewards = []
    with torch.no_grad():
        for texts in (pairs["chosen"], pairs["rejected"]):
            batch = tokenizer([f"{text} {tokenizer.eos_token}" for text in texts], return_tensors="pt")
            rewards.append(model.eval()(**batch).logits[:, 0])
    return float((rewards[0] > rewards[1]).float().mean())


def main(run_dir: str = "runs/reward") -> dict[str, float]:
    """The base has no reward head; ``reward_lora_config`` finds the one that loading adds."""
    base = save_tiny(f"{run_dir}/base", vocab=64)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=f"{run_dir}/trainer",
            max_steps=40,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=preferences(1, 256),
        processing_class=tiny_tokenizer(64),
        peft_config=driftscope.reward_lora_config(model),
    )
    print(driftscope.diagnose(trainer))
    trainer.train()
    trainer.save_model(f"{run_dir}/adapter")
    again = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)  # its head is another random one
    held_out = preferences(2, 64)
    scores = {
        "held out": accuracy(trainer.model, held_out),
        "saved and loaded": accuracy(PeftModel.from_pretrained(again, f"{run_dir}/adapter"), held_out),
    }
    print(scores)
    return scores


if __name__ == "__main__":
    main(*sys.argv[1:])
