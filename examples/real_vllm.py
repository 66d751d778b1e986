"""TRL, Liger-Kernel and a real vLLM engine on a tiny model: the two loss paths at two values of top_p.

    make demo-vllm

Each cell is a process of its own, trains four steps, and leaves records and a report in ``runs/demo-vllm``. Printed
are the mean importance sampling ratio and the gradient norm that the trainer itself logs. Needs an environment with
vLLM and, for the Liger column, a TRL that has a Liger loss (0.27.2 with Liger-Kernel 0.6.5, say).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CELLS = [(live, top_p) for top_p in (1.0, 0.8) for live in ("liger", "reference")]


def train(live: str, top_p: float, out: Path, steps: int, seed: int) -> list[dict[str, Any]]:
    """One cell, here: the trainer's own log, a row a step."""
    import torch

    import driftscope
    from driftscope.hooks.demo import NO_TRITON, even_words, prompts, quiet
    from driftscope.hooks.real_engine import import_trl, real_engine
    from driftscope.hooks.tiny import save_tiny, tiny_tokenizer

    # vLLM's CPU attention takes heads of 32 and more.
    path = str(save_tiny(out / "model", "llama", seed, num_attention_heads=2, num_key_value_heads=1))
    trl = import_trl()
    with quiet(), real_engine(dtype=torch.float32, seed=seed):
        from datasets import Dataset
        from transformers import AutoModelForCausalLM

        fused = {"use_liger_kernel": True, "liger_kernel_config": NO_TRITON} if live == "liger" else {}
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=even_words,
            args=trl.GRPOConfig(
                output_dir=str(out / "trainer"), max_steps=steps, seed=seed, learning_rate=1e-4,
                per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=4,
                max_completion_length=24, loss_type="dapo", beta=0.0, top_p=top_p, use_vllm=True,
                vllm_mode="colocate", use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1,
                report_to=[], save_strategy="no", disable_tqdm=True, **fused,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
            processing_class=tiny_tokenizer(),
        )  # fmt: skip
        if live == "liger":
            trainer.liger_grpo_loss.compiled = False
        driftscope.attach(trainer, run_dir=out, spectrum_every=1, deep_every=4, console=False)
        trainer.train()
    wanted = {"loss": "loss", "grad_norm": "grad_norm", "ratio": "sampling/importance_sampling_ratio/mean"}
    return [{k: row.get(name) for k, name in wanted.items()} for row in trainer.state.log_history if "loss" in row]


def cell(live: str, top_p: float, out: Path, steps: int, seed: int) -> list[dict[str, Any]]:
    """One cell, in a process of its own: an engine has process groups and threads that outlive it."""
    arguments = ["--cell", live, str(top_p), "--out", str(out), "--steps", str(steps), "--seed", str(seed)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{live}, top_p={top_p} failed:\n{done.stderr[-4000:]}")
    rows: list[dict[str, Any]] = json.loads((out / "log.json").read_text(encoding="utf-8"))
    return rows


def table(results: dict[tuple[str, float], list[dict[str, Any]]]) -> str:
    """The cells as a table: steps side by side."""
    lines = [f"{'':<12}{'IS ratio mean':<34}{'grad_norm with Liger':<30}grad_norm without"]
    for top_p in sorted({top_p for _, top_p in results}, reverse=True):
        liger, reference = results["liger", top_p], results["reference", top_p]
        ratio = " ".join(f"{row['ratio']:.4f}" for row in reference)
        norms = [" ".join(f"{row['grad_norm']:.3f}" for row in rows) for rows in (liger, reference)]
        lines.append(f"top_p = {top_p:<4}{ratio:<34}{norms[0]:<30}{norms[1]}")
    return "\n".join(lines)


def main() -> None:
    """Train all cells, or the one named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo-vllm"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell", nargs=2, metavar=("PATH", "TOP_P"), help="only this cell, in this process")
    options = parser.parse_args()
    if options.cell:
        live, top_p = options.cell[0], float(options.cell[1])
        rows = train(live, top_p, options.out, options.steps, options.seed)
        (options.out / "log.json").write_text(json.dumps(rows), encoding="utf-8")
        return
    results = {}
    for live, top_p in CELLS:
        out = options.out / f"{live}-{top_p}"
        out.mkdir(parents=True, exist_ok=True)
        results[live, top_p] = cell(live, top_p, out, options.steps, options.seed)
        print(f"{live}, top_p={top_p}: {out / 'report.html'}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
