"""``driftscope demo``: a real GRPO run on a tiny model, with Driftscope attached."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from driftscope.errors import UsageError

TRAINING_STACK = ("torch", "trl", "transformers", "accelerate", "datasets", "liger_kernel", "peft")


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/demo"), show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True, help="Optimizer steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--live", type=click.Choice(["liger", "reference"]), default="liger", show_default=True,
              help="The loss that trains: Liger's fused one or TRL's own.")  # fmt: skip
@click.option("--top-p", type=click.FloatRange(0.0, 1.0, min_open=True), default=0.8, show_default=True,
              help="Sampling support; 1 keeps the whole vocabulary.")  # fmt: skip
@click.option("--mode", type=click.Choice(["watch", "correct"]), default="watch", show_default=True,
              help="Only watch, or train on the corrected loss.")  # fmt: skip
def demo(
    out: Path,
    steps: int,
    seed: int,
    live: Literal["liger", "reference"],
    top_p: float,
    mode: Literal["watch", "correct"],
) -> None:
    """Train a tiny model with TRL and Liger-Kernel on this machine and write records and report to --out."""
    try:
        from driftscope.hooks.demo import run_demo

        run_dir = run_demo(out=out, steps=steps, seed=seed, live=live, top_p=top_p, mode=mode)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in TRAINING_STACK:
            raise
        raise UsageError(
            f"driftscope demo trains with TRL and Liger-Kernel, and {missing!r} is not installed here. "
            'Install the extra: pip install "driftscope[trl,liger]".'
        ) from error
    from driftscope.dashboards.report import render
    from driftscope.journal import read_run
    from driftscope.verdict import judge

    target = render(run_dir)
    click.echo(judge(read_run(run_dir)).headline)
    click.echo(f"Report: {target}")
