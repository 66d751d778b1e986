"""Run the tests in several stacks and sum them up: ``test_stacks.py seed current -- -m "not slow"``.

With ``--jobs 2`` the stacks run side by side; each line then carries its stack's name. What follows ``--`` goes to
pytest. Exit code: 0 where every stack passed, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}
SUMMARY = re.compile(
    r"^=* *(\d+ (?:passed|failed|skipped|error|errors|deselected|xfailed|warning).* in [\d.]+s.*?) *=*$"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOTHING = 5
"""pytest's exit code where no test was left to run: another stack may run them (tests/one_stack.py)."""
_print_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """How one stack's tests ended."""

    stack: str
    code: int
    summary: str
    seconds: float


def environment(jobs: int, stacks: list[str]) -> dict[str, str]:
    """The tests' environment: offline, the cores shared between the stacks, each told of the others."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    defaults = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", **OFFLINE}
    defaults["DRIFTSCOPE_STACKS"] = " ".join(stacks)
    return {**defaults, **os.environ}


def run_stack(stack: str, arguments: list[str], jobs: int, stacks: list[str]) -> Outcome:
    """pytest in ``.venv/<stack>``, its output passed on line by line."""
    started = time.monotonic()
    prefix = f"[{stack}] " if jobs > 1 else ""
    command = [str(ROOT / ".venv" / stack / "bin" / "python"), "-m", "pytest", *arguments]
    summary = "no summary: pytest did not finish"
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(jobs, stacks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    with stopped_at_exit(process):
        assert process.stdout is not None
        for line in process.stdout:
            with _print_lock:
                print(prefix + line, end="", flush=True)
            if found := SUMMARY.match(COLOUR.sub("", line).strip()):
                summary = found.group(1)
        code = process.wait()
    return Outcome(stack, code, summary, time.monotonic() - started)


@contextmanager
def stopped_at_exit(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the child when this block is left early (Ctrl-C)."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()


def main() -> int:
    """Run, then print one line per stack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=0, help="stacks side by side; 0: two where there are two cores")
    parser.add_argument("stacks", nargs="+")
    own, rest = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, rest = own[:cut], own[cut + 1 :]
    options = parser.parse_args(own)
    jobs = options.jobs or min(2, os.cpu_count() or 1)
    jobs = max(1, min(jobs, len(options.stacks)))
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda stack: run_stack(stack, rest, jobs, options.stacks), options.stacks))
    width = max(len(o.stack) for o in outcomes)
    print("\ntests by stack", flush=True)
    some = any(o.code == 0 for o in outcomes)
    good = [o.code == 0 or (o.code == NOTHING and some) for o in outcomes]
    for o, passed in zip(outcomes, good, strict=True):
        verdict = "passed" if passed else f"FAILED (pytest exit {o.code})"
        print(f"  {o.stack:<{width}}  {verdict}: {o.summary}  [{o.seconds:.0f} s in all]")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
