"""Which tests run in one stack: only such as use no training library, and never none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.one_stack import HOME, elsewhere

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ("trl", "liger_kernel", "transformers", "peft", "tests.hooks", "tests.distributed")
BOTH = ["seed", "current"]


@pytest.mark.parametrize("start", HOME)
def test_every_place_exists_and_imports_no_training_library(start: str) -> None:
    files = [path for path in ROOT.glob("tests/**/*.py") if path.relative_to(ROOT).as_posix().startswith(start)]
    assert files
    assert HOME[start] in BOTH
    if start.startswith("tests/distributed/"):
        return
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if any(n == f or n.startswith(f + ".") for f in FOREIGN)], (path, names)


@pytest.mark.parametrize(
    "path", ["tests/kernels/test_grpo.py", "tests/dashboards/test_report.py", "tests/test_docs.py"]
)
def test_every_test_has_a_stack_that_runs_it(path: str) -> None:
    here = [stack for stack in BOTH if not elsewhere(path, stack, BOTH)]
    assert len(here) == (2 if path == "tests/test_docs.py" else 1)
    for stack in BOTH:
        assert not elsewhere(path, stack, [stack])
        assert not elsewhere(path, stack, [])
        assert not elsewhere(path, "vllm", ["vllm"])
