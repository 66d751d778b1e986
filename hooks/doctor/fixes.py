"""``driftscope.fix``: apply the remedies that are safe, check that they helped, and say what was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from driftscope.doctor.facts import Facts, GradientFlow
from driftscope.doctor.foresee import foresee
from driftscope.errors import UsageError
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.hooks.doctor.flow_subject import (
    ENABLE_INPUTS,
    NON_REENTRANT,
    FixName,
    Subject,
    enable_checkpointing,
    enable_inputs,
    make_non_reentrant,
    subject_of,
)
from driftscope.hooks.doctor.flow_untouched import attributes_kept
from driftscope.hooks.head import causal_lm
from driftscope.rules.registry import registry


@dataclass(frozen=True)
class Fix:
    """What was done about one rule."""

    rule: str
    applied: bool
    action: str
    """The line that was applied; where nothing was, the line or the remedy that is left to the user."""
    why: str = ""
    """Why nothing was applied, or what the check afterwards found."""


def fix(target: Any, rules: Sequence[str] | None = None) -> list[Fix]:
    """Apply the safe remedies to a trainer or a model, before the training, and check each by running the model.

    target: a trainer (before ``train()``) or a model. rules: codes such as ``["DS301"]``; by default those that are
    found on the target. Safe are: input gradients or non-reentrant checkpointing where the graph is cut (DS301, DS302,
    DS303), the pad token (DS309), a frozen head without PEFT (DS306). Any other is left to the user, with its remedy.
    A remedy that did not help is taken back.

    Raises UsageError for an unknown code and for a target that is neither model nor trainer.
    """
    subject = subject_of(target)
    remedies = {rule.code: rule.remedy for rule in registry()}
    if isinstance(rules, str):
        rules = [rules]
    unknown = [code for code in rules or () if code not in remedies]
    if unknown:
        raise UsageError(
            f"rules={list(rules or ())!r}: no rule is called {', '.join(map(repr, unknown))}, so there is nothing to "
            f"fix for it. Use codes such as DS301; with a fix of their own: {', '.join(_REPAIRS)}."
        )
    if rules is None:
        found = _found(target, subject)
        remedies.update(found)
        rules = sorted(found)
    done = []
    for code in rules:
        repair = _REPAIRS.get(code)
        if repair is None:
            done.append(Fix(code, False, remedies[code], "it is no change that is safe to make for you"))
        else:
            done.append(replace(repair(subject), rule=code))
    return done


def _found(target: Any, subject: Subject) -> dict[str, str]:
    """What is found on the target: code -> remedy."""
    from driftscope.hooks.doctor.diagnose import diagnose

    findings = [*diagnose(target, stack=False), *foresee(Facts(flow=gradient_flow(_target(subject))))]
    found = {finding.rule: finding.remedy for finding in findings}
    return {**found, **{code: "" for code, needed in _NEEDED.items() if needed(subject)}}


def _target(subject: Subject) -> Any:
    return subject.model if subject.trainer is None else subject.trainer


# -- gradients (DS301, DS302, DS303) ------------------------------------------------------------------------------


def _gradients(subject: Subject) -> Fix:
    """Input gradients, else non-reentrant checkpointing; giving checkpointing up is left to the user."""
    flow = gradient_flow(_target(subject))
    if flow.ok:
        return Fix("", False, "", "nothing is left to do: every trainable parameter gets a gradient")
    failed: list[str] = []
    for tried in flow.fixes:
        if not tried.works or tried.name not in (ENABLE_INPUTS, NON_REENTRANT):
            continue
        undo = _apply(subject, tried.name)
        after = gradient_flow(_target(subject), try_fixes=False)
        if after.ok:
            return Fix("", True, tried.line, f"checked: {after.message}")
        undo()
        failed.append(f"{tried.line} did not help and was taken back: {after.message}")
    return Fix("", False, _left(flow), " ".join([flow.message, *failed]))


def _apply(subject: Subject, name: FixName) -> Callable[[], None]:
    """Apply a remedy for good; returns what takes it back."""
    model, args = subject.model, subject.args
    kept = attributes_kept(model)
    kwargs = getattr(args, "gradient_checkpointing_kwargs", None)
    if name == ENABLE_INPUTS:
        enable_inputs(model)
    else:
        wanted = {**(kwargs or {}), "use_reentrant": False}
        if args is not None:
            args.gradient_checkpointing_kwargs = wanted
        if getattr(model, "is_gradient_checkpointing", False):
            enable_checkpointing(model, wanted)
        make_non_reentrant(model)

    def undo() -> None:
        kept()
        if args is not None:
            args.gradient_checkpointing_kwargs = kwargs

    return undo


def _left(flow: GradientFlow) -> str:
    """The remedy that is left to the user."""
    for tried in flow.fixes:
        if tried.works:
            return tried.line
    findings = foresee(Facts(flow=flow))
    return findings[0].remedy if findings else ""


# -- the pad token (DS309) ----------------------------------------------------------------------------------------


def _configs(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [each for each in (text, config) if hasattr(each, "to_dict")]


def _pad_missing(subject: Subject) -> bool:
    """Whether a sequence classifier does not know which token is padding."""
    configs = _configs(subject.model)
    return bool(configs) and getattr(configs[0], "pad_token_id", None) is None and _head(subject.model) is not None


def _pad_token(subject: Subject) -> Fix:
    """The tokenizer's pad token, written where the model looks for it."""
    configs = _configs(subject.model)
    known = getattr(configs[0], "pad_token_id", None) if configs else None
    if known is not None:
        return Fix("", False, "", f"nothing is left to do: pad_token_id is {known}")
    line = "model.config.pad_token_id = tokenizer.pad_token_id"
    pad = getattr(getattr(subject.trainer, "processing_class", None), "pad_token_id", None)
    if pad is None or not configs:
        why = "the trainer's tokenizer has no pad token" if subject.trainer is not None else "a model has no tokenizer"
        return Fix("", False, line, f"{why}: set tokenizer.pad_token first, and give the trainer to fix()")
    undo = attributes_kept(*configs)
    for config in configs:
        config.pad_token_id = pad
    ids = torch.tensor([[1, 2, 3, pad], [1, 2, pad, pad]])
    try:  # the model's own forward says whether it takes a padded batch now
        gradient_flow(subject.model, {"input_ids": ids, "attention_mask": (ids != pad).long()}, try_fixes=False)
    except UsageError as error:
        undo()
        return Fix("", False, line, f"pad_token_id={pad} did not help and was taken back: {error}")
    return Fix("", True, f"model.config.pad_token_id = {pad}", "checked: the model takes a padded batch of two")


# -- a frozen head (DS306) ----------------------------------------------------------------------------------------


def _head(model: nn.Module) -> nn.Module | None:
    """The module that maps hidden states to the reward."""
    from driftscope.hooks.doctor.reward import find_head

    name = find_head(model)
    base: nn.Module = causal_lm(model)
    return base.get_submodule(name) if name is not None else None


def _frozen_head(subject: Subject) -> Fix:
    """Let the head train, unless PEFT would then leave it out of what it saves."""
    model, head = subject.model, _head(subject.model)
    if head is None:
        return Fix("", False, "", "no head was found that maps hidden states to a reward")
    if all(p.requires_grad for p in head.parameters()) or any("modules_to_save" in n for n, _ in head.named_modules()):
        return Fix("", False, "", "nothing is left to do: the head is trainable")
    from driftscope.hooks.doctor.reward import find_head

    name = find_head(model)
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        line = f'LoraConfig(task_type="SEQ_CLS", modules_to_save=["{name}"])'
        return Fix("", False, line, "PEFT saves what is in modules_to_save, and takes that before get_peft_model only")
    line = f"model.{name}.requires_grad_(True)"
    if getattr(subject.trainer, "optimizer", None) is not None:
        return Fix("", False, line, "the optimizer exists already and would not step the head: do it before")
    frozen = [p for p in head.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    flow = gradient_flow(_target(subject), try_fixes=False)
    own = {id(p) for p in head.parameters()}
    lost = [n for n, p in model.named_parameters() if id(p) in own and n in {*flow.missing, *flow.zero}]
    if lost or flow.error is not None:
        for parameter in frozen:
            parameter.requires_grad_(False)
        return Fix("", False, line, f"it did not help and was taken back: {flow.message}")
    return Fix("", True, line, "checked: the head gets a gradient")


_REPAIRS: dict[str, Callable[[Subject], Fix]] = {
    "DS301": _gradients,
    "DS302": _gradients,
    "DS303": _gradients,
    "DS306": _frozen_head,
    "DS309": _pad_token,
}
_NEEDED: dict[str, Callable[[Subject], bool]] = {"DS309": _pad_missing}
"""Rules with a need that can be told without the facts of another part."""
