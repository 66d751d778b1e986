"""What the watch over the sampling engine costs: mismatch figures, canary with noise floor, drift detectors.

The trainer is that of benchmarks/training.py (Qwen2.5-0.5B's shape, random completions, no generation). The engine is
faked at the trainer's own batch: its log-probs are the trainer's plus noise of bfloat16's size. With ``--unexplained``
that noise is tenfold from the second step on, so that the canary looks into every module: its most expensive case.
Each part is timed on its own, the device idle at both ends, and set against the detached step.

Use: python benchmarks/sampling.py [--out FILE] [--steps N] [--unexplained] [the options of training.py]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import driftscope
from driftscope.config import DriftscopeConfig

sys.path.insert(0, str(Path(__file__).parent))
from training import build, now, options, tell

NOISE = 0.02
WARM = 2


def with_engine(trainer: Any, unexplained: bool) -> None:
    """Give each generated batch the log-probs of an engine: the trainer's own, plus noise."""
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    score, generate = trainer._generate_and_score_completions, trainer._generate_single_turn
    noise = torch.Generator().manual_seed(0)

    def single_turn(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        completions, _ = generate(prompt_ids, *args, **kwargs)
        return completions, [[0.0] * len(row) for row in completions]

    def scored(inputs: Any) -> Any:
        out = score(inputs)
        old = out["old_per_token_logps"]
        spread = NOISE * (10.0 if unexplained and trainer.state.global_step > 0 else 1.0)
        engine = old + spread * torch.randn(old.shape, generator=noise).to(old.device, old.dtype)
        out["sampling_per_token_logps"] = engine
        out["importance_sampling_ratio"] = (old - engine).exp().clamp(max=3.0)
        return out

    trainer._generate_single_turn, trainer._generate_and_score_completions = single_turn, scored
    trainer.vllm_importance_sampling_mode = "token_truncate"


def timed(owner: Any, name: str, into: list[float]) -> None:
    """Time every call of a method."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = now()
        try:
            return original(*args, **kwargs)
        finally:
            into.append((now() - begun) * 1e3)

    setattr(owner, name, call)


def main() -> None:
    """Train detached, then attached with every step analysed, and print the parts' times."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--unexplained", action="store_true")
    args = parser.parse_args()
    parts: dict[str, list[float]] = {"mismatch": [], "canary": [], "drift": []}
    with tempfile.TemporaryDirectory() as directory:
        trainer, clock = build(args, directory)
        with_engine(trainer, args.unexplained)
        trainer.args.max_steps = args.steps
        trainer.train()
        detached = statistics.median(clock.ms[WARM:])
        clock.ms.clear()
        scope = driftscope.attach(trainer, Path(directory) / "run", console=False, report=False, spectrum_every=1,
                                  deep_every=0)  # fmt: skip
        timed(scope.probe, "_mismatch", parts["mismatch"])
        timed(scope.probe.canary, "look", parts["canary"])
        timed(scope.drift, "update", parts["drift"])
        trainer.train()
        off = dict(scope.guard.off)
        scope.detach()
        looks = [r.canary for r in driftscope.read_run(Path(directory) / "run").steps if r.canary is not None]
    ms = {name: statistics.median(values[WARM:]) for name, values in parts.items() if len(values) > WARM}
    measured = DriftscopeConfig().micro_batches or args.accumulation  # of a spectrum step
    calls = {"mismatch": measured / DriftscopeConfig.spectrum_every, "drift": 1.0}
    calls["canary"] = 1.0 / DriftscopeConfig.spectrum_every
    found = {
        "detached_step_ms": detached,
        "ms": ms,
        "largest_ms": {name: max(values) for name, values in parts.items() if values},
        "calls_per_step_at_default_cadence": calls,
        "share_of_step": {name: ms[name] * calls[name] / detached for name in ms},
        "mismatch_on_every_micro_batch": ms.get("mismatch", 0.0) * args.accumulation / detached,
        "looks": [
            look.model_dump(include={"agrees_with", "rms", "rest_rms", "noise_floor", "bf16_noise"}) for look in looks
        ],
        "off": off,
    }
    tell(args, found)


if __name__ == "__main__":
    main()
