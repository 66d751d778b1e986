"""What attached steps cost, step against step: one run, with Driftscope awake on every other pair of steps.

Blocks of detached and attached steps (benchmarks/overhead.py) differ by more than the cost that is sought, since
clocks and memory drift between them. Here neighbours are compared: two steps awake, two asleep, the first of each pair
left out. Completions have the same length in every step, so that all do the same work.

Use: python benchmarks/interleaved.py [--out FILE] [--steps N] [--tier light|spectrum] [the options of overhead.py]
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import driftscope

sys.path.insert(0, str(Path(__file__).parent))
from overhead import build, now, options, tell

PERIOD, WARM = 2, 8


class Switch(TrainerCallback):
    """Wakes a scope for two steps, lets it sleep for two, and times each step with the device idle at both ends."""

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.rows: list[tuple[bool, int, float]] = []
        self._begun: tuple[bool, int, float] | None = None
        for owner, name in ((scope, "_training_step"), (scope, "_compute_loss"), (scope, "begin_window"),
                            (scope, "end_window")):  # fmt: skip
            self._asleep(owner, name)
        self.awake = True

    def _asleep(self, owner: Any, name: str) -> None:
        awake = getattr(owner, name)
        bare = owner._originals.get(name.removeprefix("_"))

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.awake:
                return awake(*args, **kwargs)
            return bare(*args, **kwargs) if bare is not None else None

        setattr(owner, name, call)
        if bare is not None:
            setattr(owner.trainer, name.removeprefix("_"), call)

    def on_step_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        at = now()
        if self._begun is not None:
            awake, step, begun = self._begun
            self.rows.append((awake, step, (at - begun) * 1e3))
        self.awake = (state.global_step // PERIOD) % 2 == 0
        self._begun = (self.awake, state.global_step, at)


def main() -> None:
    """Train once and print the medians and the median difference of neighbours with its interval."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tier", choices=["light", "spectrum"], default="light")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer, _ = build(args, directory)
        trainer._generate_single_turn = lambda prompt_ids, *_, **__: (
            [[(7 * i + 11 * k) % 500 for k in range(args.tokens)] for i in range(len(prompt_ids))],
            None,
        )
        trainer.args.max_steps = args.steps
        scope = driftscope.attach(trainer, Path(directory) / "run", console=False, report=False, deep_every=0,
                                  spectrum_every=int(args.tier == "spectrum"))  # fmt: skip
        switch = Switch(scope)
        trainer.callback_handler.callbacks.insert(0, switch)
        trainer.train()
        off = dict(scope.guard.off)
    rows = [r for r in switch.rows if r[1] >= WARM and r[1] % PERIOD == PERIOD - 1]
    awake = {step: ms for on, step, ms in rows if on}
    asleep = {step: ms for on, step, ms in rows if not on}
    pairs = [awake[s] / asleep[s + PERIOD] - 1 for s in awake if s + PERIOD in asleep]
    pairs += [awake[s] / asleep[s - PERIOD] - 1 for s in awake if s - PERIOD in asleep]
    chance = random.Random(0)
    draws = sorted(statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    found = {
        "median_step_ms": {"awake": statistics.median(awake.values()), "asleep": statistics.median(asleep.values())},
        "pairs": len(pairs),
        "overhead": statistics.median(pairs),
        "overhead_95": [draws[50], draws[1949]],
        "off": off,
    }
    tell(args, found)


if __name__ == "__main__":
    main()
