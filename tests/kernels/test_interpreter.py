"""The Triton kernels on the CPU: the same tests again, in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETED

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter's process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("module", ["test_logprobs", "test_grpo", "test_directions"])
def test_the_kernels_pass_the_same_tests_in_the_interpreter(module):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels/{module}.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 20


@pytest.mark.skipif(not INTERPRETED, reason="looks into the interpreter's process")
def test_the_interpreter_really_runs_the_triton_rows():
    import torch

    from driftscope.kernels.rows import row_ops

    assert row_ops(torch.device("cpu"), torch.float32).__name__.endswith("rows_triton")


def test_elsewhere_the_cpu_loads_no_triton():
    code = (
        "import sys, torch\n"
        "from driftscope.kernels import fused_linear_grpo_loss, fused_linear_logprobs\n"
        "fused_linear_logprobs(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.long))\n"
        "assert 'triton' not in sys.modules and 'liger_kernel' not in sys.modules\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
