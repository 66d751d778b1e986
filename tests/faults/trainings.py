"""Run by the tests beside it as a process of its own: a real trainer with Driftscope, saved at every step.

``DIR LAST_STEP RESUMED``: trains up to LAST_STEP, from the checkpoint of RESUMED where that is not 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

from driftscope.hooks.scope import attach
from tests.hooks.runs import trainer


def train(directory: Path, last: int, resumed_at: int, run_dir: Path, **settings: object) -> None:
    with trainer(directory, max_steps=last, save_strategy="steps", save_steps=1, top_p=0.8) as made:
        options = {"spectrum_every": 2, "deep_every": 0, "capsules": 0, "console": False, "report": False, **settings}
        with attach(made, run_dir, **options):
            made.train(
                resume_from_checkpoint=str(directory / "trainer" / f"checkpoint-{resumed_at}") if resumed_at else None
            )
        assert made.state.global_step == last


if __name__ == "__main__":
    where = Path(sys.argv[1])
    train(where, int(sys.argv[2]), int(sys.argv[3]), where / "run")
