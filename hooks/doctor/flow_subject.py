"""What the gradient check looks at: a model as it stands, or as its trainer will have prepared it at a step."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from driftscope.errors import UnsupportedTrainerError, UsageError
from driftscope.hooks.doctor.checkpoints import Variant

FixName = Literal["enable_input_require_grads", "use_reentrant=False", "gradient_checkpointing=False"]
ENABLE_INPUTS: FixName = "enable_input_require_grads"
NON_REENTRANT: FixName = "use_reentrant=False"
OFF: FixName = "gradient_checkpointing=False"
FIXES = (ENABLE_INPUTS, NON_REENTRANT, OFF)
"""The remedies, best first: the first keeps the memory that checkpointing saves, the last gives it up."""


@dataclass(frozen=True)
class Subject:
    """A model, and the trainer that will train it where it was given."""

    model: nn.Module
    trainer: Any = None

    @property
    def checkpoints(self) -> bool:
        """Whether transformers' own checkpointing is, or will be, on."""
        on = bool(getattr(self.model, "is_gradient_checkpointing", False))
        return on or bool(getattr(self.args, "gradient_checkpointing", False))

    @property
    def args(self) -> Any:
        """The trainer's arguments, or ``None``."""
        return getattr(self.trainer, "args", None)

    def autocast(self) -> AbstractContextManager[Any]:
        """The trainer's mixed precision."""
        accelerator = getattr(self.trainer, "accelerator", None)
        return accelerator.autocast() if accelerator is not None else nullcontext()

    def prepare(self, fix: FixName | None = None) -> Variant:
        """Do to the model what the trainer does before its step, with a remedy applied; only inside ``untouched``.

        Returns what is to become of checkpointing that is not transformers' own.
        """
        kwargs = dict(getattr(self.args, "gradient_checkpointing_kwargs", None) or {})
        on = bool(getattr(self.args, "gradient_checkpointing", False))
        if fix == ENABLE_INPUTS:
            enable_inputs(self.model)
        if fix == NON_REENTRANT:
            kwargs["use_reentrant"] = False
            on = on or self.checkpoints
        if fix == OFF:
            switch_off(self.model)
        elif on:
            enable_checkpointing(self.model, kwargs or None)
        if self.trainer is not None and fix != OFF:
            _generation(self.trainer, self.model, kwargs)
        if fix == NON_REENTRANT:
            return "non-reentrant"
        return "off" if fix == OFF else "as it is"

    def line(self, fix: FixName) -> str:
        """The line of code, or the setting, that applies a remedy."""
        config = type(self.args).__name__ if self.args is not None else ""
        if fix == ENABLE_INPUTS:
            return "model.enable_input_require_grads()"
        if fix == NON_REENTRANT:
            if not self.checkpoints:
                return (
                    "use_reentrant=False in the calls of checkpoint(), "
                    "checkpoint_impl=CheckpointImpl.NO_REENTRANT in its wrappers"
                )
            if config:
                return f'{config}(gradient_checkpointing_kwargs={{"use_reentrant": False}})'
            return 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        if not self.checkpoints:
            return "leave the checkpoint wrappers out"
        if config and self.args.gradient_checkpointing:
            return f"{config}(gradient_checkpointing=False)"
        return "model.gradient_checkpointing_disable()"


def subject_of(target: Any) -> Subject:
    """The subject for a model or a trainer.

    Raises UsageError for anything else, UnsupportedTrainerError for a trainer whose model is sharded.
    """
    if isinstance(target, nn.Module):
        return Subject(target)
    model = getattr(target, "model", None)
    if isinstance(model, nn.Module) and hasattr(target, "args"):
        for flag, name in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
            if getattr(target, flag, False):
                raise UnsupportedTrainerError(
                    f"{name} shards the model: a backward in one process would wait for the others. Check the model "
                    "before it is sharded, or in a run of one process."
                )
        accelerator = getattr(target, "accelerator", None)
        return Subject(accelerator.unwrap_model(model) if accelerator is not None else model, target)
    raise UsageError(
        f"{type(target).__name__} is neither a torch.nn.Module nor a trainer with a model: there is nothing to run. "
        "Pass the model that is trained, or the trainer."
    )


def enable_inputs(model: nn.Module) -> None:
    """``enable_input_require_grads()``, or its hook on the input embeddings where the model has no such method.

    Raises UsageError for a model without input embeddings.
    """
    method: Any = getattr(model, "enable_input_require_grads", None)
    if method is not None:
        method()
        return
    try:
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError) as error:
        raise UsageError(
            f"{type(model).__name__} has neither enable_input_require_grads() nor input embeddings: its inputs cannot "
            "be made to require gradients. Call requires_grad_(True) on the first activation yourself."
        ) from error
    embeddings.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def enable_checkpointing(model: nn.Module, kwargs: dict[str, Any] | None) -> None:
    """``gradient_checkpointing_enable`` as transformers' Trainer calls it when the training begins."""
    method: Any = getattr(model, "gradient_checkpointing_enable", None)
    if method is None:
        raise UsageError(
            f"gradient_checkpointing=True: {type(model).__name__} has no gradient_checkpointing_enable(). Train "
            "without it, or checkpoint inside the model's own forward."
        )
    rest, own = dict(kwargs or {}), {}
    for name in ("every_n_layers", "offload"):  # transformers 5 takes them out of the dict
        if name in inspect.signature(method).parameters and name in rest:
            own[name] = rest.pop(name)
    method(gradient_checkpointing_kwargs=rest or None, **own)


def switch_off(model: nn.Module) -> None:
    """Gradient checkpointing off in every module that has transformers' flag for it."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment,unused-ignore]


def make_non_reentrant(model: nn.Module) -> int:
    """Turn torch's own reentrant checkpoint wrappers into non-reentrant ones; returns how many."""
    turned = 0
    for module in model.modules():
        function = getattr(module, "checkpoint_fn", None)
        if isinstance(function, partial) and function.keywords.get("use_reentrant"):
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

            rest = {**function.keywords, "use_reentrant": False}
            module.checkpoint_fn = partial(function.func, *function.args, **rest)  # type: ignore[assignment]
            module.checkpoint_impl = CheckpointImpl.NO_REENTRANT  # type: ignore[assignment]
            turned += 1
    return turned


def _generation(trainer: Any, model: nn.Module, kwargs: dict[str, Any]) -> None:
    """What stays of GRPO's generation: TRL switches checkpointing off for it and on again, with its own arguments."""
    if not hasattr(trainer, "_generate_and_score_completions") or not hasattr(model, "is_gradient_checkpointing"):
        return
    with contextlib.suppress(ImportError):
        from trl.models.utils import disable_gradient_checkpointing

        with disable_gradient_checkpointing(model, kwargs or None):
            pass
