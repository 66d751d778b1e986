"""What ran: versions of the stack, the model in words, the settings that the loss reads."""

from __future__ import annotations

import math
import platform
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from driftscope.config import DriftscopeConfig
from driftscope.hooks import adapters
from driftscope.hooks.head import causal_lm
from driftscope.hooks.refused import refused_options
from driftscope.hooks.sharding import whole_shape
from driftscope.records import RunInfo

PACKAGES = ("torch", "trl", "liger-kernel", "transformers", "accelerate", "peft", "vllm", "triton")
_NAMES = """
    loss_type beta epsilon epsilon_high delta use_bias_correction_kl importance_sampling_level top_entropy_quantile
    off_policy_mask_threshold scale_rewards mask_truncated_completions num_generations num_iterations
    per_device_train_batch_size gradient_accumulation_steps steps_per_generation max_completion_length temperature
    top_p top_k min_p use_vllm vllm_mode vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    use_liger_kernel bf16 fp16 gradient_checkpointing max_grad_norm learning_rate max_steps seed
"""
SETTINGS = tuple(_NAMES.split())


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_run(trainer: Any, config: DriftscopeConfig, driftscope_version: str) -> RunInfo:
    """The run's ``run.json`` as it stands at the start of training."""
    inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
    embeddings = inner.get_output_embeddings()
    sizes = [(math.prod(whole_shape(p)), p.requires_grad) for p in trainer.model.parameters()]
    vocabulary, hidden_size = _head_shape(inner, embeddings.weight)
    settings = {n: _plain(getattr(trainer.args, n)) for n in SETTINGS if hasattr(trainer.args, n)}
    return RunInfo(
        run_id=uuid.uuid4().hex[:12],
        created=time.time(),
        driftscope=driftscope_version,
        versions={"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}},
        device=adapters.device_name(trainer),
        model={
            "class": type(inner).__name__,
            "wrapper": type(trainer.model).__name__ if inner is not trainer.model else None,
            "parameters": sum(size for size, _ in sizes),
            "trainable": sum(size for size, trained in sizes if trained),
            "vocabulary": vocabulary,
            "hidden_size": hidden_size,
            "dtype": str(embeddings.weight.dtype).removeprefix("torch."),
        },
        trainer={"class": type(trainer).__name__, **settings},
        settings=config.as_dict(),
        refused=refused_options(trainer) if adapters.has_liger_loss(trainer) else [],
    )


def _head_shape(inner: Any, weight: Any) -> tuple[int, int]:
    """Vocabulary and hidden size: of the output head, or of the configuration where its shard keeps no shape."""
    shape = whole_shape(weight)
    if len(shape) == 2:
        return shape[0], shape[1]
    config = inner.config.get_text_config()
    return int(config.vocab_size), int(config.hidden_size)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
