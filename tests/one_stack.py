"""Tests that run in one stack where both are tested together: what they test is the same in both.

The stacks differ in TRL, Liger-Kernel, transformers and what those bring along (``requirements/``). The tests named
here use none of them, except for the two of ranks, which are about Driftscope's own exchange and take minutes. By
itself each stack runs all of its tests: ``make test-seed``, ``make test-current``, ``pytest``.
"""

from __future__ import annotations

from collections.abc import Collection

HOME = {
    "tests/capsule/": "current",
    "tests/dashboards/": "seed",
    "tests/detect/": "current",
    "tests/distributed/test_failure_on_one_rank.py": "seed",
    "tests/distributed/test_sharded.py": "current",
    "tests/faults/test_damaged_journals.py": "current",
    "tests/faults/test_kill.py": "current",
    "tests/kernels/": "current",
    "tests/mismatch/": "current",
    "tests/sketch/": "current",
    "tests/test_comparison_long.py": "seed",
    "tests/test_journal": "seed",
    "tests/test_schedule.py": "seed",
}
"""Beginning of a path -> the stack. The stacks' times are kept about even."""


def elsewhere(path: str, stack: str, together: Collection[str]) -> bool:
    """Whether the tests of a file, relative to the root, run in another of the stacks that are tested together."""
    home = next((home for start, home in HOME.items() if path.startswith(start)), stack)
    return home != stack and home in together
