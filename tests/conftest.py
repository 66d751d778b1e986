"""What every test runs in: offline, few threads, upstream quiet; and the fixtures that several rooms share."""

from __future__ import annotations

import os

# Before torch or TRL are imported: both read these at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import importlib.metadata
import importlib.util
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.one_stack import elsewhere

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Stack:
    """Versions of the training stack that the tests run in, as tuples of numbers."""

    trl: tuple[int, ...]
    liger: tuple[int, ...]
    transformers: tuple[int, ...]
    torch: tuple[int, ...]

    @property
    def name(self) -> str:
        """``seed`` (TRL before 1.0) or ``current``."""
        return "seed" if self.trl < (1,) else "current"

    @property
    def has_liger_loss(self) -> bool:
        """TRL 1.14 dropped its Liger loss for a fused LM head."""
        return self.trl < (1, 14)


def version(package: str) -> tuple[int, ...]:
    """An installed version's leading numbers: ``2.13.0+cpu`` -> (2, 13, 0)."""
    numbers = []
    for part in importlib.metadata.version(package).split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@cache
def find_chromium() -> str | None:
    """Path of a Chromium: the one in DRIFTSCOPE_CHROMIUM, or one on PATH."""
    named = os.environ.get("DRIFTSCOPE_CHROMIUM")
    if named:
        return named if Path(named).exists() else None
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@cache
def has_cuda() -> bool:
    """True where torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The training stack of this environment."""
    return Stack(version("trl"), version("liger_kernel"), version("transformers"), version("torch"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser for a test marked ``browser``."""
    path = find_chromium()
    assert path is not None, "mark the test with pytest.mark.browser"
    return path


def pytest_report_header() -> list[str]:
    """Which stack this is, and with what the browser tests run."""
    names = ("trl", "liger_kernel", "transformers", "peft", "torch", "triton", "numpy")
    present = [name for name in names if importlib.util.find_spec(name)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in present)
    return [f"stack: {versions}", f"browser: {find_chromium() or 'none, the tests that need one are skipped'}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to another stack what it tests as well; DRIFTSCOPE_STACKS names those that are tested together."""
    together = os.environ.get("DRIFTSCOPE_STACKS", "").split()
    own = "seed" if version("trl") < (1,) else "current"
    left = {item for item in items if elsewhere(item.path.relative_to(config.rootpath).as_posix(), own, together)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why.

    DRIFTSCOPE_REQUIRE_BROWSER=1 makes a missing browser a failure.
    """
    if item.get_closest_marker("gpu") and not has_cuda():
        pytest.skip("needs a CUDA device, and torch sees none")
    if item.get_closest_marker("browser") and find_chromium() is None:
        missing = "needs Chromium: put one on PATH or name it in DRIFTSCOPE_CHROMIUM"
        if os.environ.get("DRIFTSCOPE_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
