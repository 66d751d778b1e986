"""Driftscope: is the loss that a GRPO run optimises the loss that was configured?

    import driftscope

    scope = driftscope.attach(trainer, run_dir="runs/mine")
    trainer.train()

Names load on first use, so ``import driftscope`` brings in none of torch, TRL, Triton, Liger-Kernel and plotly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from driftscope.errors import (
    DriftscopeError,
    RecordError,
    RunDirectoryError,
    UnsupportedTrainerError,
    UsageError,
)

if TYPE_CHECKING:
    from driftscope.algebra import coefficients
    from driftscope.batch import Coefficients, TokenBatch
    from driftscope.config import DriftscopeConfig
    from driftscope.hooks.scope import attach
    from driftscope.journal import read_run
    from driftscope.spec import LossSpec
    from driftscope.verdict import judge

__version__ = "0.1.0"

__all__ = [
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
    "judge",
    "read_run",
]

_HOME = {
    "Coefficients": "driftscope.batch",
    "DriftscopeConfig": "driftscope.config",
    "LossSpec": "driftscope.spec",
    "TokenBatch": "driftscope.batch",
    "attach": "driftscope.hooks.scope",
    "coefficients": "driftscope.algebra",
    "judge": "driftscope.verdict",
    "read_run": "driftscope.journal",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
