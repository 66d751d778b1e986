"""What a tiny reward model learns through the real RewardTrainer, with each configuration that the doctor flags.

The preference is separable: the chosen text has the larger share of even words. The base is a random causal language
model, saved without a reward head, as a pretrained one is. Measured: the pairwise loss and accuracy at the end of the
training, as TRL logs them; accuracy on held-out pairs; how far their margins move when the trainer's collator pads the
batch; and, after the adapter was saved and loaded onto the base checkpoint, as a user of the model would load it,
accuracy again and how far the margins moved: several times, since each loading draws a random head of its own where
the adapter brings none. A move is |a - b| / |a| over the held-out margins, r_chosen - r_rejected.

Use: python benchmarks/reward_learning.py [--seeds N] [--out FILE] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PrinterCallback, Qwen2ForSequenceClassification
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

import driftscope
from driftscope.doctor.facts import Facts
from driftscope.doctor.foresee import foresee
from driftscope.hooks.demo import quiet
from driftscope.hooks.doctor.reward_facts import reward_facts
from driftscope.hooks.tiny import tiny_model, tiny_tokenizer

WORDS, VOCAB, HIDDEN = 40, 64, 32
PAIRS, HELD_OUT, STEPS, RELOADS = 1024, 200, 80, 8
MORE_PADDING = 8


@dataclass
class Setup:
    """What differs between configurations."""

    model: Any
    peft_config: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    collator: Any = None
    tokenizer: Any = None
    cls: Any = AutoModelForSequenceClassification
    """What a user loads the base with."""
    prepare: Callable[[Any], None] = lambda trainer: None
    """Done to the trainer before it trains."""


@dataclass
class Outcome:
    """What came of one training; accuracies in [0, 1], ``None`` where there is none."""

    name: str
    seed: int
    rules: tuple[str, ...] = ()
    loss: float | None = None
    """Mean pairwise loss of the last ten steps."""
    train: float | None = None
    held_out: float | None = None
    padding_move: float | None = None
    reloaded: list[float] = field(default_factory=list)
    reload_move: list[float] = field(default_factory=list)
    error: str | None = None
    """What kept it from being built, trained or loaded."""


class WithLmHead(Qwen2ForSequenceClassification):  # type: ignore[misc]
    """A reward model that has kept its language model head, which the reward does not depend on."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def _load(base: Path, cls: Any = AutoModelForSequenceClassification, **kwargs: Any) -> Any:
    return cls.from_pretrained(base, **{"num_labels": 1, **kwargs})


def right(base: Path) -> Setup:
    """driftscope.reward_lora_config(model)."""
    model = _load(base)
    return Setup(model, driftscope.reward_lora_config(model, lora_dropout=0.0))


def _lora(**kwargs: Any) -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, **kwargs)


def no_task_type(base: Path) -> Setup:
    """LoraConfig() without a task type: the head stays frozen and is not saved."""
    return Setup(_load(base), _lora())


def causal_lm(base: Path) -> Setup:
    """task_type="CAUSAL_LM", the default of TRL's ModelConfig."""
    return Setup(_load(base), _lora(task_type="CAUSAL_LM"))


def causal_lm_model(base: Path) -> Setup:
    """task_type="CAUSAL_LM" on AutoModelForCausalLM.from_pretrained(path, num_labels=1)."""
    from transformers import AutoModelForCausalLM

    return Setup(_load(base, AutoModelForCausalLM), _lora(task_type="CAUSAL_LM"))


def lora_on_head(base: Path) -> Setup:
    """LoRA on every linear layer, the head too; the head not in modules_to_save."""
    return Setup(_load(base), _lora(target_modules="all-linear"))


def head_frozen(base: Path) -> Setup:
    """SEQ_CLS, and the random head frozen afterwards; it is saved."""

    def freeze(trainer: Any) -> None:
        trainer.model.get_base_model().score.requires_grad_(False)

    return Setup(_load(base), _lora(task_type="SEQ_CLS"), prepare=freeze)


def no_module(base: Path) -> Setup:
    """target_modules that match nothing."""
    return Setup(_load(base), _lora(task_type="SEQ_CLS", target_modules=["query", "value"]))


def outside_path(base: Path) -> Setup:
    """The adapter on a language model head that the reward does not depend on."""
    return Setup(_load(base, WithLmHead), _lora(task_type="SEQ_CLS", target_modules=["lm_head"]), cls=WithLmHead)


def two_labels(base: Path) -> Setup:
    """num_labels=2, transformers' default."""
    model = _load(base, num_labels=2)
    return Setup(model, driftscope.reward_lora_config(model, lora_dropout=0.0))


def wrong_pad(base: Path) -> Setup:
    """The collator pads with another id than model.config.pad_token_id."""
    return Setup(**{**vars(right(base)), "collator": DataCollatorForPreference(pad_token_id=WORDS + 1)})


def new_pad(base: Path) -> Setup:
    """A pad token added to the tokenizer, the embeddings not resized."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return Setup(**{**vars(right(base)), "tokenizer": tokenizer})


def no_input_grads(base: Path) -> Setup:
    """Reentrant checkpointing switched on by hand, so that TRL does not enable input gradients."""

    def checkpoint(trainer: Any) -> None:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    return Setup(**{**vars(right(base)), "prepare": checkpoint})


CONFIGURATIONS: dict[str, Callable[[Path], Setup]] = {
    made.__name__: made
    for made in (
        right,
        no_task_type,
        causal_lm,
        causal_lm_model,
        lora_on_head,
        head_frozen,
        no_module,
        outside_path,
        two_labels,
        wrong_pad,
        new_pad,
        no_input_grads,
    )
}


def preferences(count: int, seed: int) -> Dataset:
    """Pairs of texts of 4 to 6 words; in the chosen one the share of even words is larger by 0.3 or more."""
    draw, chosen, rejected = random.Random(seed), list[str](), list[str]()
    while len(chosen) < count:
        texts = [[draw.randrange(WORDS) for _ in range(draw.randint(4, 6))] for _ in range(2)]
        low, high = sorted(texts, key=_even)
        if _even(high) - _even(low) >= 0.3:
            chosen.append(" ".join(f"w{i}" for i in high))
            rejected.append(" ".join(f"w{i}" for i in low))
    return Dataset.from_dict({"chosen": chosen, "rejected": rejected})


def _even(words: list[int]) -> float:
    return sum(word % 2 == 0 for word in words) / len(words)


def learn(name: str, directory: Path, seed: int = 0, steps: int = STEPS, reloads: int = RELOADS) -> Outcome:
    """Train one configuration and measure it. ``directory``: scratch space."""
    base = directory / "base"
    if not base.exists():
        made = tiny_model("qwen2", seed, VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN)
        made.config.initializer_range = 0.02  # of the head that is added later; the usual one
        made.save_pretrained(base)
    out = Outcome(name, seed)
    held_out = preferences(HELD_OUT, seed + 2)
    torch.manual_seed(seed)
    setup = CONFIGURATIONS[name](base)
    try:
        with quiet():
            trainer = _trainer(setup, directory, seed, steps)
    except Exception as error:  # noqa: BLE001 - what the stack refuses is the outcome
        facts = _refused(setup) if setup.peft_config is not None else None
        out.rules = foresee(Facts(reward=facts)).rules
        out.error = f"{type(error).__name__}: {error}"
        return out
    with quiet():
        setup.prepare(trainer)
        facts = reward_facts(trainer, try_fixes=False)
        out.rules = foresee(Facts(reward=facts, flow=facts.flow)).rules
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001
            out.error = f"{type(error).__name__}: {error}"
            return out
        last = next(log for log in reversed(trainer.state.log_history) if "accuracy" in log)
        out.loss, out.train = last["loss"], last["accuracy"]
        before = margins(trainer.model, held_out)
        out.held_out = _right(before)
        if trainer.data_collator.pad_token_id < VOCAB and before.dim() == 1:
            padded = margins(trainer.model, held_out, trainer.data_collator.pad_token_id, MORE_PADDING)
            out.padding_move = _move(before, padded)
        trainer.save_model(str(directory / name))
        try:
            for again in range(reloads):
                torch.manual_seed(1000 + again)
                after = margins(PeftModel.from_pretrained(_load(base, setup.cls), directory / name), held_out)
                out.reloaded.append(_right(after))
                out.reload_move.append(_move(before, after))
        except Exception as error:  # noqa: BLE001
            out.error = f"{type(error).__name__}: {error}"
    return out


def _refused(setup: Setup) -> Any:
    return reward_facts(setup.model, peft_config=setup.peft_config, try_fixes=False)


def _trainer(setup: Setup, directory: Path, seed: int, steps: int) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "trainer"),
        "max_steps": steps,
        "seed": seed,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 32,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 10,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    } | setup.arguments
    trainer = RewardTrainer(
        model=setup.model,
        args=RewardConfig(**arguments),
        train_dataset=preferences(PAIRS, seed + 1),
        processing_class=setup.tokenizer or tiny_tokenizer(VOCAB),
        peft_config=setup.peft_config,
        data_collator=setup.collator,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def margins(model: Any, pairs: Dataset, pad_token_id: int = VOCAB - 3, more: int = 0) -> Tensor:
    """r_chosen - r_rejected (B,); of all logits (B, T, V) where the model answers one a token.

    pad_token_id: what the batch is padded with. more: further padding for the chosen texts.
    """
    tokenizer = tiny_tokenizer(VOCAB)
    ids = {
        side: [torch.tensor(tokenizer(f"{text} {tokenizer.eos_token}")["input_ids"]) for text in pairs[side]]
        for side in ("chosen", "rejected")
    }
    length = max(len(row) for rows in ids.values() for row in rows)
    chosen = _logits(model, ids["chosen"], length + more, pad_token_id)
    return chosen - _logits(model, ids["rejected"], length, pad_token_id)


def _right(values: Tensor) -> float:
    """Share of positive margins."""
    return round(float((values > 0).double().mean()), 4)


def _move(before: Tensor, after: Tensor) -> float:
    return round(float((after - before).norm() / before.norm()), 4)


def _logits(model: Any, rows: list[Tensor], length: int, pad_token_id: int) -> Tensor:
    """The first column of the logits (B,), or all of a language model's (B, T, V)."""
    ids = torch.stack([nn.functional.pad(row, (0, length - len(row)), value=pad_token_id) for row in rows])
    mask = torch.stack([torch.arange(length) < len(row) for row in rows]).long()
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits[:, 0] if logits.dim() == 2 else logits


def main(arguments: list[str] | None = None) -> None:
    """Train every configuration with every seed and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CONFIGURATIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    outcomes = []
    for name in given.names:
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as directory:
                outcomes.append(learn(name, Path(directory), seed))
            print(json.dumps(asdict(outcomes[-1])), flush=True)
    if given.out:
        versions = {name: version(name) for name in ("trl", "transformers", "peft", "torch")}
        document = {"device": f"CPU, {platform.machine()}", "versions": versions}
        lines = [asdict(outcome) for outcome in outcomes]
        given.out.write_text(json.dumps({**document, "outcomes": lines}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
