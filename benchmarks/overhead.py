"""What Driftscope costs: step time and peak memory of a real GRPOTrainer, detached and attached, in one run.

The model is random with the shape of Qwen2-0.5B. Completions are random tokens: no time is spent on generation, so the
shares are upper bounds. Blocks of detached and attached steps alternate; each tier is timed on its own.

Use: python benchmarks/overhead.py [--out FILE] [--layers N] [--tokens T] [--blocks N] [--cpu]
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import driftscope
from driftscope.config import DriftscopeConfig
from driftscope.hooks.tiny import tiny_tokenizer

STEPS, DEEP_STEPS = 12, 5  # of a block; the first two warm up
SPECTRUM_EVERY = DriftscopeConfig.spectrum_every  # the shares are weighed by the default cadence
DEEP_EVERY = DriftscopeConfig.deep_every
TIERS = ("light", "spectrum", "deep")


class Clock(TrainerCallback):
    """Wall time from the begin of an optimizer step to the begin of the next, the device idle at both ends.

    So what callbacks do at a step's end is in it. The last step of a block has no next one and is left out.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._begun: float | None = None
        self.lengths = torch.Generator()  # of the completions: seeded anew, so that every block does the same work

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        begun, self._begun = self._begun, now()
        if begun is not None:
            self.ms.append((self._begun - begun) * 1e3)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun = None


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def build(args: argparse.Namespace, directory: str) -> tuple[Any, Clock]:
    """A trainer whose completions are random tokens of uneven length."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 38 // 7,
        num_hidden_layers=args.layers, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
        pad_token_id=505, eos_token_id=506, bos_token_id=None, max_position_embeddings=8192,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16 if not args.cpu else torch.float32)
    settings = GRPOConfig(
        output_dir=directory, max_steps=STEPS, per_device_train_batch_size=args.batch, num_generations=args.batch,
        gradient_accumulation_steps=args.accumulation, max_completion_length=args.tokens, bf16=not args.cpu,
        use_cpu=args.cpu, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, learning_rate=1e-6,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(400)]}),
        processing_class=tiny_tokenizer(),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    generator = torch.Generator()
    clock.lengths = generator

    def random_completions(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        lengths = torch.randint(args.tokens // 2, args.tokens + 1, (len(prompt_ids),), generator=generator)
        return [torch.randint(0, 500, (int(n),), generator=generator).tolist() for n in lengths], None

    trainer._generate_single_turn = random_completions
    return trainer, clock


def block(trainer: Any, clock: Clock, tier: str | None) -> dict[str, Any]:
    """Train one block; ``tier`` is what every attached step measures, ``None`` is detached."""
    every = {
        None: None,
        "light": {"spectrum_every": 0, "deep_every": 0},
        "spectrum": {"spectrum_every": 1, "deep_every": 0},
        "deep": {"spectrum_every": 1, "deep_every": 1},
    }[tier]
    clock.ms.clear()
    clock.lengths.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as run_dir:
        scope = (
            driftscope.attach(trainer, run_dir, console=False, report=False, **every) if every is not None else None
        )
        trainer.args.max_steps = STEPS if tier != "deep" else DEEP_STEPS
        trainer.train()
        off = dict(scope.guard.off) if scope is not None else {}
        own_ms = 0.0
        if scope is not None:
            scope.detach()
            records = driftscope.read_run(Path(run_dir)).steps
            own_ms = sum(r.overhead_ms for r in records if r.step > 2) / (trainer.args.max_steps - 2)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    print(f"{tier or 'detached'}: {statistics.median(clock.ms[2:]):.0f} ms a step", file=sys.stderr, flush=True)
    return {"tier": tier or "detached", "ms": clock.ms[2:], "peak_bytes": peak, "own_ms": own_ms, "off": off}


def summarise(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Step times by tier, their ratio to the same step detached (median), and the share at the default cadence."""
    tiers = {b["tier"] for b in blocks}
    ms = {t: statistics.median(x for b in blocks if b["tier"] == t for x in b["ms"]) for t in tiers}
    bare = [
        statistics.median(step) for step in zip(*(b["ms"] for b in blocks if b["tier"] == "detached"), strict=True)
    ]
    each = {
        t: statistics.median(x / bare[i] for b in blocks if b["tier"] == t for i, x in enumerate(b["ms"])) - 1
        for t in tiers - {"detached"}
    }
    own = {t: statistics.median(b["own_ms"] for b in blocks if b["tier"] == t) for t in each}
    peaks = {t: max(b["peak_bytes"] or 0 for b in blocks if b["tier"] == t) for t in tiers}
    weights = {"deep": 1 / DEEP_EVERY, "spectrum": 1 / SPECTRUM_EVERY - 1 / DEEP_EVERY}
    weights["light"] = 1 - sum(weights.values())
    return {
        "median_step_ms": ms,
        "overhead_by_tier": each,
        "detached_blocks_ms": [statistics.median(b["ms"]) for b in blocks if b["tier"] == "detached"],
        "overhead_at_default_cadence": sum(weights[t] * each[t] for t in each),
        "recorded_overhead_ms": own,
        "recorded_overhead_at_default_cadence": sum(weights[t] * own[t] for t in own) / ms["detached"],
        "extra_peak_bytes": {t: peaks[t] - peaks["detached"] for t in each},
        "off": [b["off"] for b in blocks if b["off"]],
    }


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that the overhead benchmarks share: Qwen2-0.5B's shape by default."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    for name, default in (("layers", 24), ("hidden", 896), ("vocabulary", 151936), ("tokens", 1024), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--cpu", action="store_true")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return parser


def tell(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print a result with device, versions and settings, and write it where it was asked for."""
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not args.cpu else platform.machine(),
        "versions": {n: version(n) for n in ("torch", "trl", "transformers", "liger-kernel")},
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        **found,
    }
    text = json.dumps(result, indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(text)


def main() -> None:
    """Train blocks of detached and attached steps in turn, and print the shares."""
    parser = options(__doc__)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer, clock = build(args, directory)
        block(trainer, clock, None)  # warm up
        order = [step for tier in args.tiers for step in (None, tier)]
        blocks = [block(trainer, clock, tier) for _ in range(args.blocks) for tier in order]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    tell(args, {"parameters": parameters, **summarise(blocks)})


if __name__ == "__main__":
    main()
