"""What the stack probe tries: each feature of the GRPO loss as settings for TRL and as terms of the oracle.

A feature is measured by itself, on a loss that is otherwise plain (dr_grpo, whose normaliser needs no other
micro-batch); the last, ``configuration``, is everything that the user has set, at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from driftscope.doctor.facts import Settings
from driftscope.spec import IsMode, LossType

Variant = Literal["plain", "softcap", "scale", "adapter"]
"""Which tiny model: a plain head, a softcap on the logits (Gemma 2), a scale (Cohere), LoRA on lm_head."""

TOKEN_SUMS = ("dapo", "cispo", "vespo")
"""Loss types that divide by the tokens of the whole generation batch."""
LOSS_SETTINGS = (
    "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "beta", "use_bias_correction_kl",
    "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
    "entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max", "temperature",
    "max_completion_length", "gradient_accumulation_steps", "steps_per_generation", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
)  # fmt: skip
"""Settings of GRPOConfig that the loss depends on."""
PLAIN: Mapping[str, Any] = {
    "loss_type": "dr_grpo",
    "beta": 0.0,
    "temperature": 1.0,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 16,
}
KL = {"beta": 0.5}  # strong enough to be seen beside the policy term
ENTROPY = 2.0


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature: how TRL is told of it, and what the oracle is with it on and with it off."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of GRPOConfig, over ``PLAIN``. Those beyond ``needs`` are left out where the installed TRL lacks them."""
    needs: tuple[str, ...] = ()
    """Fields without which the installed TRL does not have the feature."""
    on: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``LossSpec`` with the feature on, over what the trainer's settings say."""
    off: Mapping[str, Any] | None = None
    """The same with it off; ``None`` where there is no such thing."""
    raw_off: bool = False
    """Off is ``lm_head.weight`` alone in place of the model's own head."""
    variant: Variant = "plain"
    tools: bool = False
    uneven: bool = False
    """Whether the other micro-batches of the window are longer than this one."""
    in_use: bool = False


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the user's model does between ``lm_head.weight`` and its logits."""

    softcap: bool = False
    scale: bool = False
    adapter: bool = False

    @property
    def variant(self) -> Variant:
        """The tiny model that stands for it in the ``configuration`` row."""
        return "softcap" if self.softcap else "scale" if self.scale else "adapter" if self.adapter else "plain"


def catalogue(settings: Settings, head: Head, *, tools: bool, processes: int) -> tuple[Feature, ...]:
    """The features to try for a configuration, ``configuration`` last."""
    return (
        *_terms(settings, tools=tools, processes=processes),
        *_policy(settings),
        *_heads(head),
        *_modes(settings),
        *_loss_types(settings),
        _configuration(settings, head, tools=tools, processes=processes),
    )


def corrects(settings: Settings) -> bool:
    """Whether the configuration applies an importance sampling correction."""
    return bool(settings.get("use_vllm", False)) and bool(settings.get("vllm_importance_sampling_correction", True))


def steps_per_generation(settings: Settings, processes: int) -> int:
    """Micro-batches of one generation batch, as GRPOConfig works it out."""
    accumulation = int(settings.get("gradient_accumulation_steps", 1))
    whole = settings.get("generation_batch_size")
    if settings.get("steps_per_generation") is None and whole is not None:
        return max(1, int(whole) // (int(settings.get("per_device_train_batch_size", 8)) * processes))
    return int(settings.get("steps_per_generation", accumulation))


def _terms(settings: Settings, *, tools: bool, processes: int) -> tuple[Feature, ...]:
    """The five terms that Liger's loss was found to leave out, and the normaliser of several steps a generation."""
    loss_type = settings.get("loss_type", "dapo")
    accumulation = int(settings.get("gradient_accumulation_steps", 1))
    per_generation = steps_per_generation(settings, processes)
    summed = loss_type in TOKEN_SUMS
    delta = settings.get("delta")
    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    return (
        _correction("is_correction", mode, in_use=corrects(settings)),
        Feature(
            name="normalizer",
            settings={"loss_type": loss_type if summed else "dapo"},
            on={"normalizer": "generation_batch_rescaled"},
            off={"normalizer": "micro_batch"},
            uneven=True,
            in_use=summed and max(accumulation, per_generation) * processes > 1,
        ),
        Feature(
            name="steps_per_generation",
            settings={"loss_type": loss_type if summed else "dapo", "steps_per_generation": 4},
            needs=("steps_per_generation",),
            on={"normalizer": "generation_batch_rescaled"},
            off={"normalizer": "generation_batch"},
            in_use=summed and per_generation != accumulation,
        ),
        Feature(name="tool_mask", on={"tool_mask": True}, off={"tool_mask": False}, tools=True, in_use=tools),
        Feature(
            name="kl_bias_correction",
            settings={**KL, "use_bias_correction_kl": True},
            needs=("use_bias_correction_kl",),
            on={"kl_bias_correction": True},
            off={"kl_bias_correction": False},
            in_use=bool(settings.get("use_bias_correction_kl", False)) and settings.get("beta", 0.0) != 0.0,
        ),
        Feature(
            name="delta",
            settings={"delta": float(delta or 1.5)},
            needs=("delta",),
            on={"delta": float(delta or 1.5)},
            off={"delta": None},
            in_use=delta is not None,
        ),
    )


def _policy(settings: Settings) -> tuple[Feature, ...]:
    """Levels, masks, temperature and the entropy bonus."""
    temperature = float(settings.get("temperature", 1.0))
    quantile = float(settings.get("top_entropy_quantile", 1.0))
    threshold = settings.get("off_policy_mask_threshold")
    tried = {
        "temperature": temperature if temperature != 1.0 else 0.7,
        "top_entropy_quantile": quantile if quantile < 1.0 else 0.5,
        "off_policy_mask_threshold": float(threshold or 0.5),
    }
    return (
        Feature(
            name="importance_sampling_level=sequence",
            settings={"importance_sampling_level": "sequence"},
            needs=("importance_sampling_level",),
            on={"importance_sampling_level": "sequence"},
            off={"importance_sampling_level": "token"},
            in_use=settings.get("importance_sampling_level", "token") == "sequence",
        ),
        Feature(
            name="temperature",
            settings={"temperature": tried["temperature"]},
            on={"temperature": tried["temperature"]},
            off={"temperature": 1.0},
            in_use=temperature != 1.0,
        ),
        Feature(
            name="top_entropy_quantile",
            settings={"top_entropy_quantile": tried["top_entropy_quantile"]},
            needs=("top_entropy_quantile",),
            on={"top_entropy_quantile": tried["top_entropy_quantile"]},
            off={"top_entropy_quantile": 1.0},
            in_use=quantile < 1.0,
        ),
        Feature(
            name="off_policy_mask_threshold",
            settings={"off_policy_mask_threshold": tried["off_policy_mask_threshold"]},
            needs=("off_policy_mask_threshold",),
            on={"off_policy_threshold": tried["off_policy_mask_threshold"]},
            off={"off_policy_threshold": None},
            in_use=threshold is not None,
        ),
        Feature(
            name="entropy_coef",
            settings={"entropy_coef": ENTROPY},
            needs=("entropy_coef",),
            on={"entropy_coef": ENTROPY},
            off={"entropy_coef": 0.0},
            in_use=settings.get("entropy_coef", 0.0) != 0.0 or bool(settings.get("use_adaptive_entropy", False)),
        ),
    )


def _heads(head: Head) -> tuple[Feature, ...]:
    return (
        Feature(name="logit_softcap", raw_off=True, variant="softcap", in_use=head.softcap),
        Feature(name="logit_scale", raw_off=True, variant="scale", in_use=head.scale),
        Feature(name="head_adapter", raw_off=True, variant="adapter", in_use=head.adapter),
    )


def _modes(settings: Settings) -> tuple[Feature, ...]:
    """The correction in the modes that ``is_correction`` was not tried in: their ratios differ in shape."""
    used = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    name = "vllm_importance_sampling_mode"
    return tuple(_correction(f"{name}={mode}", mode) for mode in get_args(IsMode) if mode != used)


def _correction(name: str, mode: str, *, in_use: bool = False) -> Feature:
    return Feature(
        name=name,
        settings={
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": mode,
        },
        needs=("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        on={"is_correction": True, "is_mode": mode},
        off={"is_correction": False},
        in_use=in_use,
    )


def _loss_types(settings: Settings) -> tuple[Feature, ...]:
    """Every loss type that the oracle knows; one that the installed TRL does not know refuses itself.

    The window is even, so that the row speaks of the policy term and not of the normaliser. luspo is tried at the
    level that is configured: its paper's is the sequence, and paths that agree there can differ at the token.
    """
    used = settings.get("loss_type", "dapo")
    known = get_args(LossType)
    level = settings.get("importance_sampling_level", "token")
    extra = {"luspo": {"importance_sampling_level": level}}
    return tuple(
        Feature(name=f"loss_type={name}", settings={"loss_type": name, **extra.get(name, {})}, in_use=name == used)
        for name in (*known, *(() if used in known else (used,)))
    )


def _configuration(settings: Settings, head: Head, *, tools: bool, processes: int) -> Feature:
    values = {name: value for name in LOSS_SETTINGS if (value := settings.get(name)) is not None}
    per_generation = steps_per_generation(settings, processes)
    windows = max(int(values.get("gradient_accumulation_steps", 1)), per_generation) * processes
    return Feature(
        name="configuration",
        settings={"gradient_accumulation_steps": 1, **values, "steps_per_generation": per_generation},
        variant=head.variant,
        tools=tools,
        uneven=windows > 1,
        in_use=True,
    )
