"""What differs between TRL versions, in one place: the configured loss, the batch, and the seams of the trainer.

Everything is read from the trainer at hand, never from a table of versions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftscope.batch import TokenBatch
from driftscope.errors import UnsupportedTrainerError
from driftscope.spec import LossSpec

# Without one of these Driftscope could not work, or would take a setting for unset and judge another loss.
NEEDED = (
    "_compute_loss", "_get_per_token_logps_and_entropies", "compute_loss", "training_step", "accelerator", "args",
    "model", "state", "callback_handler", "add_callback", "remove_callback", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "off_policy_mask_threshold",
    "top_entropy_quantile",
)  # fmt: skip
LIGER_LOSS = ("liger_grpo_loss", "liger_loss")  # the trainer's Liger loss module: until TRL 1.7, and 1.8 to 1.13
Inputs = Mapping[str, Any]


def require_grpo(trainer: object) -> None:
    """Refuse what is not a GRPO trainer of a TRL version whose seams are known.

    Raises UnsupportedTrainerError with setting, mechanism and remedy.
    """
    kind = type(trainer).__name__
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if not missing and hasattr(trainer, "loss_type") and hasattr(trainer, "_metrics"):
        return
    if any(cls.__name__ == "GRPOTrainer" for cls in type(trainer).__mro__):
        lacking = ", ".join(missing or ["loss_type or _metrics"])
        raise UnsupportedTrainerError(
            f"{kind} is a GRPO trainer of a TRL version that lacks {lacking}: Driftscope reads the loss through it. "
            "Use TRL 0.27.2 or later, or open an issue with your version."
        )
    raise UnsupportedTrainerError(
        f"{kind} is not a GRPO trainer: Driftscope compares the loss paths of trl.GRPOTrainer and its subclasses. "
        "Attach to the GRPOTrainer itself."
    )


def accumulation_steps(trainer: Any) -> int:
    """Micro-batches of the current accumulation window."""
    return int(
        getattr(trainer, "current_gradient_accumulation_steps", None) or trainer.args.gradient_accumulation_steps
    )


def entropy_coef(trainer: Any) -> float:
    """The entropy bonus in force for the current window (the adaptive controller changes it between windows)."""
    if not getattr(trainer, "_entropy_bonus_enabled", False):
        return 0.0
    if getattr(trainer, "use_adaptive_entropy", False):
        low = trainer._last_world_entropy <= trainer.args.entropy_target
        return float(trainer.entropy_coef) if low else 0.0
    return float(trainer.entropy_coef)


def spec_from_trainer(trainer: Any, inputs: Inputs, *, bonus: float | None = None) -> LossSpec:
    """The loss as configured, with the normaliser that the loss type intends.

    ``bonus``: the entropy coefficient in force when the batch was trained on, where it was read earlier.
    """
    args = trainer.args
    correction = bool(
        getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False)
    )
    cap = getattr(trainer, "vllm_importance_sampling_clip_max", getattr(trainer, "vllm_importance_sampling_cap", None))
    return LossSpec(
        loss_type=trainer.loss_type,
        epsilon_low=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        delta=args.delta,
        importance_sampling_level=trainer.importance_sampling_level,
        beta=trainer.beta,
        kl_bias_correction=bool(getattr(args, "use_bias_correction_kl", False)),
        is_correction=correction,
        is_mode=getattr(trainer, "vllm_importance_sampling_mode", "sequence_mask"),
        is_cap=cap,
        is_floor=getattr(trainer, "vllm_importance_sampling_clip_min", None),
        tool_mask="tool_mask" in inputs,
        off_policy_threshold=getattr(trainer, "off_policy_mask_threshold", None),
        top_entropy_quantile=getattr(trainer, "top_entropy_quantile", 1.0),
        entropy_coef=entropy_coef(trainer) if bonus is None else bonus,
        accumulation_steps=accumulation_steps(trainer),
        steps_per_generation=getattr(args, "steps_per_generation", None),
        num_processes=trainer.accelerator.num_processes,
        max_completion_length=trainer.max_completion_length,
        temperature=trainer.temperature,
        **_shapes(args),
    )


def batch_from_inputs(
    inputs: Inputs,
    logps_BT: Tensor,
    entropies_BT: Tensor | None,
    *,
    rank_mean_tokens: tuple[float, float] | None = None,
) -> TokenBatch:
    """The algebra's batch from TRL's own batch and the captured log-probs."""
    items = inputs.get("num_items_in_batch")
    return TokenBatch(
        logps_BT=logps_BT,
        entropies_BT=entropies_BT,
        completion_mask_BT=inputs["completion_mask"],
        tool_mask_BT=inputs.get("tool_mask"),
        advantages=inputs["advantages"],
        old_logps_BT=inputs.get("old_per_token_logps"),
        ref_logps_BT=inputs.get("ref_per_token_logps"),
        sampling_logps_BT=inputs.get("sampling_per_token_logps"),
        is_ratio=inputs.get("importance_sampling_ratio"),
        num_items_in_batch=float(items) if items is not None else None,
        rank_mean_tokens=rank_mean_tokens,
    )


def policy_mask(inputs: Inputs) -> Tensor:
    """Tokens that the loss should train on, (B, T)."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def stand_in(trainer: Any, **answers: Any) -> Any:
    """A shallow copy of the trainer whose assignments and metrics do not reach the real one.

    TRL's own methods run on it; ``answers`` replace attributes of the copy.
    """
    twin = object.__new__(type(trainer))
    twin.__dict__.update(trainer.__dict__)
    for wrapped in ("compute_loss", "training_step"):
        twin.__dict__.pop(wrapped, None)
    if trainer.accelerator.num_processes > 1:
        twin.__dict__["accelerator"] = _Alone(trainer.accelerator)
    twin.__dict__["_metrics"] = {mode: _Sink() for mode in trainer._metrics}
    twin.__dict__.update(answers)
    return twin


class _Alone:
    """An accelerator whose collectives stay in this process.

    A shadow must not enter one: a rank whose probe has failed would leave the others waiting. What they return goes
    into metrics, which are dropped; only the entropy quantile is really taken over all processes (``over_processes``).
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, tensor: Any) -> Any:
        return tensor

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor


def over_processes(trainer: Any, spec: LossSpec) -> str | None:
    """Why the loss of one process cannot be compared by itself, or ``None``."""
    if trainer.accelerator.num_processes > 1 and spec.top_entropy_quantile < 1.0:
        return "top_entropy_quantile takes its threshold over all processes"
    return None


class _Sink(dict[str, list[float]]):
    """Metrics of a shadow run: taken and dropped."""

    def __missing__(self, key: str) -> list[float]:
        return []


def has_liger_loss(trainer: Any) -> bool:
    """Whether the installed TRL has a fused Liger loss of its own (until 1.13)."""
    return hasattr(type(trainer), "compute_liger_loss")


def own_path(trainer: Any) -> str:
    """The path that the trainer's own settings choose: ``liger`` or ``reference``."""
    return "liger" if has_liger_loss(trainer) and getattr(trainer, "use_liger_kernel", False) else "reference"


def live_head(trainer: Any, live: str) -> str:
    """``fused`` where the live path never holds the logits, else ``full``."""
    fused = hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head") and not has_liger_loss(trainer)
    return "fused" if fused or live != "reference" else "full"


def liger_settings(trainer: Any) -> dict[str, Any]:
    """What a user of Liger's loss would give its constructor for this trainer."""
    args = trainer.args
    return {
        "beta": trainer.beta,
        "epsilon_low": trainer.epsilon_low,
        "epsilon_high": trainer.epsilon_high,
        "temperature": trainer.temperature,
        "use_ref_model": trainer.beta != 0.0,
        "loss_type": trainer.loss_type,
        "max_completion_length": trainer.max_completion_length,
        "importance_sampling_level": trainer.importance_sampling_level,
        "delta": args.delta,
        "use_bias_correction_kl": bool(getattr(args, "use_bias_correction_kl", False)),
        **_shapes(args),
    }


def _shapes(args: Any) -> dict[str, Any]:
    """The settings that shape sapo and vespo, as far as this TRL has them."""
    names = ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos")
    found = {name: getattr(args, name, None) for name in (*names, "vespo_k_neg", "vespo_lambda_neg")}
    return {name: value for name, value in found.items() if value is not None}


def loss_scale(trainer: Any) -> float:
    """Factor by which a gradient scaler has multiplied the loss before the backward (fp16), 1 without one."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def autocast(trainer: Any) -> Any:
    """The autocast context of the live forward."""
    return trainer.accelerator.autocast()


def compute_dtype(trainer: Any, hidden: Tensor) -> torch.dtype:
    """The coarsest dtype that the head computes in: autocast's where it is on, else the hidden states'."""
    kind = hidden.device.type
    with autocast(trainer):
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return max(low, hidden.dtype, key=lambda dtype: torch.finfo(dtype).eps)


def device_name(trainer: Any) -> str:
    """The device in words."""
    device = trainer.accelerator.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
