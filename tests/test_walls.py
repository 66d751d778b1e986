"""The walls between the rooms: who may import what, read from the sources and seen at run time."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"driftscope": "driftscope", "hooks": "driftscope.hooks", "dashboards": "driftscope.dashboards"}
HEAVY = ("torch", "trl", "transformers", "triton", "liger_kernel", "plotly", "peft", "vllm", "accelerate", "datasets")


def sources() -> dict[str, Path]:
    """Dotted module name -> file, for the three rooms, without the links inside driftscope/."""
    found = {}
    for folder, package in ROOMS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "driftscope" and parts[0] in ("hooks", "dashboards"):
                continue
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def type_checking_only(node: ast.If) -> bool:
    """True for ``if TYPE_CHECKING:``, whose body never runs."""
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree: ast.AST, module: str = "", *, packages: bool = False) -> set[str]:
    """Every module that the code imports at run time, anywhere in it, functions included.

    ``importlib.import_module("x")`` with a literal counts. ``packages``: keep dotted names instead of the first part.
    """
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and type_checking_only(node):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base]).rstrip(".")
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "import_optional") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return names if packages else {name.split(".")[0] for name in names}


SOURCES = sources()
IMPORTS = {name: imported(ast.parse(path.read_text(encoding="utf-8")), name) for name, path in SOURCES.items()}


def breaches(upstream: set[str], allowed: str | None, within: str = "driftscope") -> dict[str, list[str]]:
    """Modules under ``within``, outside ``allowed``, that import one of ``upstream``."""
    return {
        module: sorted(names & upstream)
        for module, names in IMPORTS.items()
        if names & upstream
        and f"{module}.".startswith(f"{within}.")
        and not (allowed and f"{module}.".startswith(f"{allowed}."))
    }


def test_there_is_something_to_look_at():
    assert {"driftscope", "driftscope.hooks.scope", "driftscope.dashboards.report", "driftscope.algebra"} <= set(
        SOURCES
    )


def test_dashboards_never_import_torch():
    assert breaches({"torch", "trl", "transformers"}, None, "driftscope.dashboards") == {}


def test_only_hooks_import_trl():
    assert breaches({"trl"}, "driftscope.hooks") == {}


def test_only_kernels_import_triton_or_liger():
    assert breaches({"triton", "liger_kernel"}, "driftscope.kernels") == {}


def test_only_the_records_side_imports_pydantic():
    """pydantic stays at the JSON boundary: nothing that imports torch imports pydantic."""
    assert {m for m, names in IMPORTS.items() if {"torch", "pydantic"} <= names} == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch", True),
        ("def f():\n    from torch.nn import Linear", True),
        ("import importlib\nimportlib.import_module('torch.nn')", True),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch", True),
        ("from torchless import x", False),
        ("TEXT = 'import torch'", False),
    ],
)
def test_the_wall_sees_every_way_to_import(code, found):
    assert ("torch" in imported(ast.parse(code))) is found


def loaded_after(statement: str) -> set[str]:
    """Which of HEAVY are in sys.modules after a statement in a fresh interpreter."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import driftscope",
        "import driftscope.hooks",
        "import driftscope.dashboards",
        "import driftscope; driftscope.read_run; driftscope.DriftscopeConfig; driftscope.LossSpec",
        "import driftscope; driftscope.judge",
        "import driftscope; driftscope.TokenBatch",
        "import driftscope.cli",
        "import driftscope.kernels",
    ],
)
def test_importing_it_loads_nothing_heavy(statement):
    assert loaded_after(statement) == set()


@pytest.mark.parametrize("module", ["driftscope.dashboards.report", "driftscope.dashboards.console"])
def test_what_shows_records_loads_no_torch(module):
    assert loaded_after(f"import {module}") <= {"plotly"}


def test_every_module_has_a_docstring_and_fits_its_room():
    for name, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{name} says nothing about itself"
        assert text.count("\n") <= 400, f"{name} is over 400 lines: split it"
