"""Which trainable parameters a real backward reaches, where the graph is cut, and which remedy mends it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from driftscope.doctor.facts import FlowFix, GradientFlow
from driftscope.hooks.doctor.cut import Cut, first_cut
from driftscope.hooks.doctor.flow_batch import prepare
from driftscope.hooks.doctor.flow_run import Loss, backward, held_bytes
from driftscope.hooks.doctor.flow_subject import FIXES, NON_REENTRANT, OFF, FixName, Subject, subject_of
from driftscope.hooks.doctor.flow_untouched import untouched
from driftscope.hooks.doctor.flow_words import describe


def gradient_flow(
    model: Any, batch: Mapping[str, Any] | None = None, *, loss: Loss | None = None, try_fixes: bool = True
) -> GradientFlow:
    """Run one real forward and backward in train mode and report which trainable parameters got no gradient.

    model: a ``torch.nn.Module`` (a PeftModel or one with transformers' adapters too), judged as it stands; or a
    trainer, whose model is judged as the trainer will have it at a step: with its checkpointing enabled, and for
    GRPO as TRL leaves it after a generation.
    batch: keyword arguments of the forward, ``input_ids`` (B, L) and so on; by default a synthetic sequence.
    loss: callable (model, batch) -> scalar tensor; by default ``outputs.loss``, else a sum of the outputs with uneven
    weights. try_fixes: try each remedy on the model, and measure what its forward keeps for the backward.

    The model is as it was afterwards: parameters, gradients, buffers, modes, hooks, checkpointing, configuration and
    random state. Raises UsageError for a batch that does not fit the model, and for what is neither model nor trainer;
    UnsupportedTrainerError for a trainer whose model is sharded (DeepSpeed, FSDP).
    """
    subject = subject_of(model)
    given = prepare(subject.model, batch, check=loss is None)
    flow = _measure(subject, given, loss)
    if try_fixes and flow.trainable and not flow.ok:
        flow = replace(flow, fixes=tuple(_try(subject, given, loss, name) for name in _candidates(flow)))
    return flow


def _candidates(flow: GradientFlow) -> tuple[FixName, ...]:
    """The remedies that can make a difference."""
    return FIXES if flow.checkpointing != "none" else FIXES[:1]


def _measure(subject: Subject, batch: dict[str, Any], loss: Loss | None, fix: FixName | None = None) -> GradientFlow:
    """One forward and backward, with a remedy or without."""
    model = subject.model
    with untouched(model), subject.autocast():
        variant = subject.prepare(fix)
        done = backward(model, batch, loss, variant)
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        zero = tuple(name for name in done.zero if not _start_explains(model, name))
        cut, places = _cut(model, done.missing, done.calls)
        adapters = [name for name in trainable if _adapter(model, name) is not None]
        lost = {*done.missing, *zero}
        flow = GradientFlow(
            missing=done.missing,
            zero=zero,
            cut_at=(cut.name or type(model).__name__) if cut is not None and cut.name is not None else None,
            cut_kind=cut.kind if cut is not None else None,
            error=done.error,
            trainable=len(trainable),
            adapters=len(adapters),
            adapters_missing=sum(name in lost for name in adapters),
            checkpointing=done.checkpointing,
        )
    return replace(flow, message=describe(flow, places))


def _cut(model: nn.Module, names: tuple[str, ...], calls: Any) -> tuple[Cut | None, int]:
    if not names:
        return None, 0
    return first_cut(model, names, calls)


def _try(subject: Subject, batch: dict[str, Any], loss: Loss | None, name: FixName) -> FlowFix:
    """One remedy, tried on the model."""
    line, note = subject.line(name), ""
    try:
        tried = _measure(subject, batch, loss, name)
        held = None
        if tried.ok:
            with untouched(subject.model), subject.autocast():
                held = held_bytes(subject.model, batch, loss, subject.prepare(name))
        else:
            note = tried.message
        return FlowFix(name=name, line=line, works=tried.ok, saved_bytes=held, note=note or _NOTES.get(name, ""))
    except Exception as error:  # noqa: BLE001 - a remedy that cannot be applied is a result
        return FlowFix(name=name, line=line, works=False, note=f"it cannot be applied: {error}")


_NOTES: dict[str, str] = {
    NON_REENTRANT: "keeps the memory that checkpointing saves",
    OFF: "gives up the memory that checkpointing saves",
}


def _adapter(model: nn.Module, name: str) -> tuple[nn.Module, str, str] | None:
    """PEFT's layer of an adapter's parameter, the layer's name, and the adapter's; ``None`` for other parameters."""
    at = name
    while at:
        at = at.rpartition(".")[0]
        with suppress(AttributeError):
            layer = model.get_submodule(at)
            kinds = getattr(layer, "adapter_layer_names", None)
            if kinds is not None:
                parts = name.removeprefix(f"{at}.").split(".")
                own = parts[0] in kinds and parts[0] != "modules_to_save" and len(parts) > 1
                return (layer, at, parts[1]) if own else None
    return None


def _start_explains(model: nn.Module, name: str) -> bool:
    """Whether a zero gradient is that of an adapter's start: a factor of the same product is zero, and is trained.

    So it is for lora_A, whose gradient carries lora_B = 0: after one step lora_B is not zero, and lora_A learns.
    """
    found = _adapter(model, name)
    if found is None:
        return False
    layer, prefix, adapter = found
    for other, parameter in layer.named_parameters():
        parts = other.split(".")
        if f"{prefix}.{other}" == name or len(parts) < 2 or parts[1] != adapter:
            continue
        learns = parameter.grad is not None and bool(torch.any(parameter.grad))
        if learns and not bool(torch.any(parameter.detach())):
            return True
    return False
