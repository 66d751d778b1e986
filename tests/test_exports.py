"""The public names: what they are, where they come from, and that they load only when used."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import driftscope

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = [
    "Coefficients",
    "DriftscopeConfig",
    "DriftscopeError",
    "LossSpec",
    "RecordError",
    "RunDirectoryError",
    "TokenBatch",
    "UnsupportedTrainerError",
    "UsageError",
    "__version__",
    "attach",
    "coefficients",
    "diagnose",
    "fix",
    "gradient_flow",
    "judge",
    "read_run",
    "reward_lora_config",
]


def test_the_public_names_are_these():
    assert sorted(driftscope.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_to_its_own_object(name):
    value = getattr(driftscope, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("driftscope.")
        assert value.__doc__


def test_dir_shows_names_that_are_not_loaded_yet():
    assert set(PUBLIC) <= set(dir(driftscope))


@pytest.mark.parametrize("module", ["driftscope", "driftscope.hooks"])
def test_an_unknown_name_is_an_attribute_error(module):
    package = importlib.import_module(module)
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = package.atach


@pytest.mark.parametrize(
    "first",
    [
        "import driftscope.hooks.scope",
        "from driftscope.hooks.scope import Scope",
        "import driftscope; driftscope.attach",
        "from driftscope.hooks import DriftscopeCallback",
        "pass",
    ],
)
def test_attach_is_the_function_whatever_was_imported_first(first):
    """A submodule of the same name must not take the function's place."""
    code = (
        f"{first}\n"
        "import driftscope\n"
        "from driftscope.hooks import attach\n"
        "assert callable(attach), attach\n"
        "assert attach is driftscope.attach\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_exception_tree_hangs_on_one_base_with_an_exit_code():
    for name in ("RecordError", "RunDirectoryError", "UnsupportedTrainerError", "UsageError"):
        error = getattr(driftscope, name)
        assert issubclass(error, driftscope.DriftscopeError)
        assert error("x").exit_code == 2


def test_the_version_stands_in_one_form_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert driftscope.__version__ == project["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[({re.escape(project['version'])}|Unreleased)\]", changelog, re.MULTILINE)
    assert importlib.metadata.version("driftscope") == project["version"]


def test_the_rooms_are_there_after_a_plain_import():
    """``callbacks=[driftscope.hooks.DriftscopeCallback(...)]`` needs no import but ``import driftscope``."""
    code = (
        "import driftscope, sys; assert 'torch' not in sys.modules; "
        "driftscope.hooks.DriftscopeCallback, driftscope.kernels.fused_linear_logprobs, driftscope.dashboards.render"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)
