"""What the rules on a configuration share: the settings in force, and the arithmetic of ratios over a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from driftscope.doctor.facts import Facts, Settings

# Standard deviation of a token's log-prob in nats, where it was not measured: 0.02 in bfloat16 and 2e-6 in float32 are
# what small random models show (docs/upstream.md); float16 has three more bits than bfloat16.
ASSUMED_NOISE = {"bfloat16": 0.02, "float16": 0.02 / 8, "float32": 2e-6}
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def grpo_settings(facts: Facts) -> Settings | None:
    """The settings of a GRPO run, ``None`` for another trainer and where there are none."""
    settings = facts.settings
    return settings if settings is not None and settings.trainer == "grpo" else None


def sampling_values(settings: Settings) -> dict[str, Any]:
    """temperature, top_p, top_k, min_p and repetition_penalty in force: ``generation_kwargs`` overrides the settings.

    Source: TRL ``GRPOTrainer``, which updates the sampling parameters with ``args.generation_kwargs``.
    """
    over = settings.get("generation_kwargs")
    over = over if isinstance(over, Mapping) else {}
    found = {name: settings.get(name, default) for name, default in _SAMPLING.items()}
    found |= {name: over[name] for name in _SAMPLING if over.get(name) is not None}
    return {name: int(value) if name == "top_k" else float(value) for name, value in found.items()}


def truncates(settings: Settings) -> bool:
    """Whether sampling leaves tokens out."""
    values = sampling_values(settings)
    return bool(values["top_p"] < 1.0 or values["top_k"] > 0 or values["min_p"] > 0.0)


def corrects(settings: Settings) -> bool:
    """Whether the loss is multiplied by an importance sampling ratio of the sampling engine."""
    return bool(settings.get("use_vllm")) and bool(settings.get("vllm_importance_sampling_correction", True))


def ratio_mode(settings: Settings) -> str:
    """The ratio's mode; token_truncate is assumed, the mildest, where the installed TRL has no such setting."""
    return str(settings.get("vllm_importance_sampling_mode", "token_truncate"))


def ratio_cap(settings: Settings) -> float | None:
    """The upper limit of the ratio, by either of its names."""
    for name in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"):
        value = settings.get(name)
        if value is not None:
            return float(value)
    return None


def completion_length(settings: Settings) -> int:
    """Tokens of the longest completion."""
    return max(1, int(settings.get("max_completion_length", 1)))


def compute_dtype(facts: Facts) -> str:
    """The dtype in which the run computes log-probs: mixed precision's, else the weights'."""
    settings = facts.settings
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if settings is not None and settings.get(flag):
            return dtype
    return weight_dtype(facts)


def weight_dtype(facts: Facts) -> str:
    """The dtype of most trainable weights: measured, else as the model is loaded; empty where neither tells.

    Adapters that PEFT makes itself are float32, whatever the dtype of the model (``autocast_adapter_dtype``).
    """
    if facts.model is not None and facts.model.dtype:
        return facts.model.dtype
    settings = facts.settings
    if settings is None or settings.get("use_peft"):
        return ""
    kwargs = settings.get("model_init_kwargs")
    named = kwargs.get("dtype") if isinstance(kwargs, Mapping) else None
    dtype = str(named or settings.get("dtype", "float32"))
    return "" if dtype == "auto" else dtype


def share_over(limit: float, noise: float) -> float:
    """Share of a normal variable with mean 0 and this standard deviation that exceeds a limit."""
    return 0.5 * math.erfc(limit / (noise * math.sqrt(2.0))) if noise > 0 else 0.0
