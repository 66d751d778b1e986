"""Driftscope: is the loss that a GRPO run optimises the loss that was configured?

    import driftscope

    scope = driftscope.attach(trainer, run_dir="runs/mine")
    trainer.train()

Names load on first use, so ``import driftscope`` brings in none of torch, TRL, Triton, Liger-Kernel and plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names
from driftscope.errors import (
    DriftscopeError,
    RecordError,
    RunDirectoryError,
    UnsupportedTrainerError,
    UsageError,
)

if TYPE_CHECKING:
    from driftscope import dashboards as dashboards
    from driftscope import hooks as hooks
    from driftscope import kernels as kernels
    from driftscope.algebra import coefficients
    from driftscope.batch import Coefficients, TokenBatch
    from driftscope.config import DriftscopeConfig
    from driftscope.hooks.doctor.diagnose import diagnose
    from driftscope.hooks.doctor.fixes import fix
    from driftscope.hooks.doctor.flow import gradient_flow
    from driftscope.hooks.doctor.reward import reward_lora_config
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
    "diagnose",
    "fix",
    "gradient_flow",
    "judge",
    "read_run",
    "reward_lora_config",
]

_HOME = {
    "Coefficients": "driftscope.batch",
    "DriftscopeConfig": "driftscope.config",
    "LossSpec": "driftscope.spec",
    "TokenBatch": "driftscope.batch",
    "attach": "driftscope.hooks.scope",
    "coefficients": "driftscope.algebra",
    "dashboards": "driftscope.dashboards",
    "diagnose": "driftscope.hooks.doctor.diagnose",
    "fix": "driftscope.hooks.doctor.fixes",
    "gradient_flow": "driftscope.hooks.doctor.flow",
    "hooks": "driftscope.hooks",
    "judge": "driftscope.verdict",
    "kernels": "driftscope.kernels",
    "read_run": "driftscope.journal",
    "reward_lora_config": "driftscope.hooks.doctor.reward",
}

__getattr__, __dir__ = lazy_names(globals(), _HOME)
