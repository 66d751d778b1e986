"""``driftscope.reward_lora_config``: a LoRA configuration that trains and saves the reward head."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from driftscope.errors import UsageError
from driftscope.hooks.doctor.reward_head import base_of, find_head, head_modules

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["find_head", "reward_lora_config"]

_DEFAULTS = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "use_rslora": False, "use_dora": False}
# TRL's ModelConfig -> LoraConfig, as trl.trainer.utils.get_peft_config maps them; its task type is not taken.
_FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
}


def reward_lora_config(
    model: nn.Module,
    r: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.05,
    target_modules: str | Sequence[str] | None = None,
    modules_to_save: Sequence[str] | None = None,
    *,
    model_config: Any = None,
    use_rslora: bool = False,
    use_dora: bool = False,
    **kwargs: Any,
) -> LoraConfig:
    """A ``peft.LoraConfig`` for RewardTrainer's ``peft_config``: task type SEQ_CLS, the head trained and saved.

    model: the sequence classification model that will be trained; it is run on one short sequence and stays as it is.
    target_modules: PEFT's own choice for this architecture by default, and where PEFT has none every linear layer but
    the head. modules_to_save: modules besides the head. model_config: TRL's ``ModelConfig``, whose LoRA fields are
    taken as ``trl.get_peft_config`` takes them, but for ``lora_task_type`` (CAUSAL_LM by default) and ``use_peft``.
    kwargs: further fields of LoraConfig. The defaults are those of TRL's ``ModelConfig``.
    Raises UsageError: PEFT is missing; the model has no head, or an adapter already; ``task_type`` is given; a setting
    is given twice; a module to save does not exist.
    """
    given = {
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "use_rslora": use_rslora,
        "use_dora": use_dora,
    }
    if "task_type" in kwargs:
        raise UsageError(
            f"task_type={kwargs['task_type']!r}: a reward model's task type is SEQ_CLS, with which PEFT trains and "
            "saves the head; leave task_type out."
        )
    lora_config = _lora_config_class()
    heads = _heads_of(model)
    settings: dict[str, Any] = {**given, "target_modules": target_modules, **kwargs}
    if model_config is not None:
        more = _from_model_config(model_config, settings)
        modules_to_save = [*(more.pop("modules_to_save") or ()), *(modules_to_save or ())]
        settings.update(more)
    base = base_of(model)
    if settings["target_modules"] is None and not settings.get("target_parameters"):
        settings["target_modules"] = _targets(base)
    if settings["target_modules"] == "all-linear" and "exclude_modules" not in kwargs:
        settings["exclude_modules"] = rf"(.*\.)?({'|'.join(re.escape(name) for name in heads)})(\..*)?"
    if "fan_in_fan_out" not in kwargs and _transposed(base, heads):
        settings["fan_in_fan_out"] = True
    saved = list(dict.fromkeys([*heads, *_existing(base, modules_to_save or ())]))
    return lora_config(**{"bias": "none", **settings}, task_type="SEQ_CLS", modules_to_save=saved)


def _lora_config_class() -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UsageError(
            "reward_lora_config makes a peft.LoraConfig, and PEFT is not installed here; pip install peft."
        ) from error
    return LoraConfig


def _heads_of(model: Any) -> tuple[str, ...]:
    """The head, and what else stands between backbone and logits."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"reward_lora_config finds the head on the model itself and was given a {name}; load the model first: "
            "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)."
        )
    if hasattr(model, "get_base_model"):
        raise UsageError(
            f"{name} has an adapter already, and RewardTrainer takes no peft_config with such a model; give the base "
            "model: model.merge_and_unload()."
        )
    try:
        heads = head_modules(model)
    except Exception as error:
        raise UsageError(
            f"the head of {name} could not be looked for, since the model does not run on one short sequence: "
            f"{type(error).__name__}: {error}. Make the model run on its device, then call reward_lora_config."
        ) from error
    if not heads:
        raise UsageError(
            f"{name} has no head that maps hidden states to one row of logits per sequence, so there is nothing to "
            "put into modules_to_save; load the model with AutoModelForSequenceClassification.from_pretrained(path, "
            "num_labels=1)."
        )
    return heads


def _from_model_config(model_config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The LoRA fields of TRL's ModelConfig; refuses a setting that stands in the call as well."""
    twice = [name for name, default in _DEFAULTS.items() if settings[name] != default]
    twice += [name for name in ("target_modules", "target_parameters") if settings.get(name) is not None]
    if twice:
        raise UsageError(f"{', '.join(twice)} given beside model_config, which sets it as well; set it in one place.")
    taken = {ours: getattr(model_config, theirs) for theirs, ours in _FIELDS.items() if hasattr(model_config, theirs)}
    missing = [theirs for theirs in ("lora_r", "lora_alpha") if not hasattr(model_config, theirs)]
    if missing:
        raise UsageError(
            f"model_config is a {type(model_config).__name__} without {' and '.join(missing)}; give trl.ModelConfig."
        )
    taken.setdefault("modules_to_save", None)
    if taken.get("target_parameters") is None:
        taken.pop("target_parameters", None)  # unknown to PEFT before 0.17
    return taken


def _targets(base: nn.Module) -> str | None:
    """``None`` where PEFT has its own choice for the architecture, else every linear layer."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    return None if getattr(getattr(base, "config", None), "model_type", None) in KNOWN else "all-linear"


def _transposed(base: nn.Module, heads: Sequence[str]) -> bool:
    """Whether the backbone's layers keep their weight as (in, out), as GPT-2's do, and none as (out, in)."""
    from transformers.pytorch_utils import Conv1D

    inside = [m for name, m in base.named_modules() if not name.startswith(tuple(heads))]
    return any(isinstance(m, Conv1D) for m in inside) and not any(isinstance(m, nn.Linear) for m in inside)


def _existing(base: nn.Module, names: Sequence[str]) -> list[str]:
    """The names, each of which ends a module's name; PEFT passes over the others in silence."""
    if isinstance(names, str):
        names = [names]
    every = [name for name, _ in base.named_modules() if name]
    for name in names:
        if not any(known.endswith(name) for known in every):
            leaves = sorted({known.rpartition(".")[2] for known in every})
            near = difflib.get_close_matches(name, leaves, n=1)
            raise UsageError(
                f"modules_to_save names {name!r}, which {type(base).__name__} does not have, and PEFT would pass over "
                f"it in silence; {f'did you mean {near[0]!r}?' if near else 'leave it out.'}"
            )
    return list(names)
