"""A reward model under its real loss: one batch, one backward, and what the head has to do with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.doctor.facts import GradientFlow, RewardFacts
from driftscope.errors import UsageError
from driftscope.hooks.doctor.flow_run import quiet
from driftscope.hooks.doctor.flow_subject import Subject, subject_of
from driftscope.hooks.doctor.flow_untouched import untouched
from driftscope.hooks.doctor.reward_batch import (
    Loss,
    alone,
    checked,
    metrics_kept,
    outside_vocabulary,
    pad_token_id,
    pairwise_loss,
    synthetic_batch,
    trainer_batch,
    trainer_loss,
    vocabulary,
)
from driftscope.hooks.doctor.reward_head import base_of, embedding_of, head_modules
from driftscope.hooks.doctor.reward_peft import Adapters, adapters_of, is_adapted, own_weights
from driftscope.hooks.doctor.reward_random import head_is_random

PERTURBATION = 0.01
"""Size of the change of the head's weight, relative to its root mean square."""


def reward_facts(
    subject: Any, batch: Mapping[str, Any] | None = None, *, peft_config: Any = None, try_fixes: bool = True
) -> RewardFacts:
    """Run one real batch of the pairwise loss forward and backward, and measure what it does to the reward head.

    subject: a RewardTrainer, which gives its own rows, collator and loss; or a model, with a synthetic batch.
    batch: ``input_ids`` and ``attention_mask`` (2B, T), the chosen sequences above the rejected ones.
    peft_config: put on a copy of the model first, as RewardTrainer would; what PEFT raises is a fact. Models only.
    try_fixes: try the remedies for a cut gradient. Everything is as it was afterwards: parameters, gradients, modes,
    hooks, configuration, random state, metrics. Raises UsageError for what is neither trainer nor model, and for a
    batch that is no batch of pairs.
    """
    asked = subject_of(subject)
    if peft_config is not None:
        if asked.trainer is not None:
            raise UsageError("peft_config is for a model; a trainer has put its own on the model already.")
        return _with_adapter(asked.model, batch, peft_config, try_fixes)
    with metrics_kept(asked.trainer), untouched(asked.model):
        given = _batch(asked, batch)
        run = _Run(asked, given, trainer_loss(asked.trainer) if asked.trainer is not None else pairwise_loss)
        return run.facts(try_fixes)


def _with_adapter(model: nn.Module, batch: Mapping[str, Any] | None, peft_config: Any, try_fixes: bool) -> RewardFacts:
    from peft import get_peft_model

    config, task = copy.deepcopy(peft_config), getattr(peft_config, "task_type", None)
    with untouched(model):
        trial = copy.deepcopy(model)
        try:
            adapted = get_peft_model(trial, config)
        except Exception as error:  # noqa: BLE001 - what it is, is the fact
            heads = head_modules(model)
            return RewardFacts(
                head=heads[-1] if heads else None,
                head_modules=heads,
                num_labels=getattr(getattr(model, "config", None), "num_labels", None),
                pad_token_id=pad_token_id(model),
                peft=True,
                task_type=str(getattr(task, "value", task)) if task is not None else None,
                modules_to_save=tuple(getattr(peft_config, "modules_to_save", None) or ()),
                peft_error=_words(error),
                model_class=type(model).__name__,
            )
        return reward_facts(adapted, batch, try_fixes=try_fixes)


def _batch(asked: Subject, batch: Mapping[str, Any] | None) -> dict[str, Any]:
    if batch is not None:
        return checked(batch, asked.model)
    if asked.trainer is None:
        return synthetic_batch(asked.model)
    return checked(trainer_batch(asked.trainer), asked.model)


@dataclass
class _Run:
    """One model, one batch, one loss; only inside ``untouched``."""

    subject: Subject
    batch: dict[str, Any]
    loss: Loss

    def facts(self, try_fixes: bool) -> RewardFacts:
        model = self.subject.model
        heads = head_modules(model)
        facts = RewardFacts(
            head=heads[-1] if heads else None,
            head_modules=heads,
            num_labels=getattr(getattr(base_of(model), "config", None), "num_labels", None),
            pad_token_id=pad_token_id(model),
            model_class=type(base_of(model)).__name__,
            pairs=self.batch["input_ids"].shape[0] // 2,
            trainer=self.subject.trainer is not None,
        )
        adapters = adapters_of(model)
        facts = _peft(facts, adapters, base_of(model))
        if facts.head is not None:
            random, how = head_is_random(model, facts.head)
            facts = replace(facts, head_random=random, head_random_evidence=how)
        beyond = outside_vocabulary(self.batch, model)
        if beyond is not None:
            what = "the pad token's id" if beyond == _padding_id(self.batch) else "token id"
            words = f"{what} {beyond} is outside the embedding, which has {vocabulary(model)} rows"
            return replace(facts, loss_error=words, padding_error=words, flow_error=words)
        facts = self._backward(facts, adapters)
        facts = self._forward(facts)
        flow, why = self._flow(try_fixes)
        return replace(facts, flow=flow, flow_error=why)

    def _head(self, facts: RewardFacts) -> nn.Module | None:
        return base_of(self.subject.model).get_submodule(facts.head) if facts.head is not None else None

    def _backward(self, facts: RewardFacts, adapters: Adapters | None) -> RewardFacts:
        """One real forward and backward in train mode, with checkpointing as the trainer will have it."""
        model, seen = self.subject.model, list[bool]()
        head = self._head(facts)
        with untouched(model), self.subject.autocast(), quiet():
            self.subject.prepare()
            embedding = embedding_of(base_of(model))
            if embedding is not None:
                embedding.register_forward_hook(_requires_grad(seen))
            model.train()
            try:
                loss = self.loss(model, self.batch)
                facts = replace(facts, loss=float(loss.detach()))
                loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - what it is, is the fact
                facts = replace(facts, loss_error=_words(error))
            norm = _norm([p.grad for _, p in own_weights(head)]) if head is not None else None
            reached = None
            if adapters is not None and adapters.layers is not None:
                reached = sum(_reached(layer) for layer in adapters.layers.values())
        return replace(facts, head_grad_norm=norm, adapters_reached=reached, input_grads=seen[0] if seen else None)

    def _forward(self, facts: RewardFacts) -> RewardFacts:
        """Forwards in evaluation mode: the loss with another head, the reward with and without padding."""
        model, head = self.subject.model, self._head(facts)
        with untouched(model), self.subject.autocast(), quiet(), torch.no_grad():
            model.eval()
            facts = replace(facts, reward_shape=tuple(alone(model, self.batch, 0).shape[1:]))
            if head is not None and facts.loss is not None:
                facts = replace(facts, loss_change=self._loss_change(head))
            if facts.head is None:
                return facts
            try:
                return replace(facts, padding_shift=self._padding_shift())
            except Exception as error:  # noqa: BLE001 - what it is, is the fact
                return replace(facts, padding_error=_words(error))

    def _loss_change(self, head: nn.Module) -> float:
        """Relative change of the loss when the head's weight moves by 1% of its size; restored bit for bit."""
        model = self.subject.model
        weights = [p for _, p in own_weights(head)]
        kept = [p.detach().clone() for p in weights]
        before = float(self.loss(model, self.batch))
        generator = torch.Generator().manual_seed(0)
        try:
            for p in weights:
                noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                size = float(p.float().square().mean().sqrt()) or 1.0
                p.add_(noise * (PERTURBATION * size))
            after = float(self.loss(model, self.batch))
        finally:
            for p, value in zip(weights, kept, strict=True):
                p.copy_(value)
        return abs(after - before) / abs(before) if before else abs(after - before)

    def _padding_shift(self) -> float | None:
        """Relative change of the reward of the most padded sequence against the same sequence alone."""
        model, ids, mask = self.subject.model, self.batch["input_ids"], self.batch["attention_mask"]
        lengths = mask.sum(-1)
        row = int(lengths.argmin())
        if int(lengths[row]) == ids.shape[1]:
            pad = _padding_id_of(self.subject)
            if pad is None:
                return None
            rows = vocabulary(model)
            if rows is not None and pad >= rows:
                raise UsageError(f"the pad token's id {pad} is outside the embedding, which has {rows} rows")
            ids, mask = nn.functional.pad(ids, (0, 4), value=pad), nn.functional.pad(mask, (0, 4), value=0)
        padded = model(input_ids=ids, attention_mask=mask).logits.float()
        single = alone(model, {"input_ids": ids, "attention_mask": mask}, row)[0].float()
        size = max(float(single.abs().max()), float(padded.abs().mean()))
        return float((padded[row] - single).abs().max()) / size if size else 0.0

    def _flow(self, try_fixes: bool) -> tuple[GradientFlow | None, str | None]:
        try:
            from driftscope.hooks.doctor.flow import gradient_flow

            asked = self.subject.trainer if self.subject.trainer is not None else self.subject.model
            return gradient_flow(asked, self.batch, loss=self.loss, try_fixes=try_fixes), None
        except Exception as error:  # noqa: BLE001 - the other facts stand without it
            return None, _words(error)


def _peft(facts: RewardFacts, adapters: Adapters | None, base: nn.Module) -> RewardFacts:
    """What PEFT does with the head."""
    modules = {name: base.get_submodule(name) for name in facts.head_modules}
    head = modules[facts.head] if facts.head is not None else None
    own = list(own_weights(head)) if head is not None else []
    if head is not None:
        facts = replace(facts, head_trains=bool(own) and all(p.requires_grad for _, p in own))
    if adapters is None:
        return facts
    unsaved = tuple(name for name, module in modules.items() if not _saved(name, module, adapters.saved))
    return replace(
        facts,
        peft=True,
        task_type=adapters.task_type,
        modules_to_save=adapters.modules_to_save,
        adapters=len(adapters.layers) if adapters.layers is not None else None,
        head_adapted=is_adapted(head) if head is not None else None,
        head_saved=facts.head not in unsaved if head is not None else None,
        unsaved=unsaved,
    )


def _saved(name: str, module: nn.Module, saved: frozenset[str]) -> bool:
    """Whether all weights of a module are among the names that PEFT saves."""
    return all(any(key.endswith(f".{name}.{weight}") for key in saved) for weight, _ in own_weights(module))


def _requires_grad(seen: list[bool]) -> Any:
    """A forward hook that notes whether the output requires a gradient."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            seen.append(output.requires_grad)

    return hook


def _reached(layer: nn.Module) -> bool:
    """Whether some weight of the adapter on a layer got a gradient other than zero."""
    under: Any = layer.base_layer
    base = {id(p) for p in under.parameters()}
    return any(p.grad is not None and bool(torch.any(p.grad != 0)) for p in layer.parameters() if id(p) not in base)


def _norm(gradients: list[Tensor | None]) -> float:
    return float(sum(float(g.float().square().sum()) for g in gradients if g is not None) ** 0.5)


def _padding_id(batch: Mapping[str, Any]) -> int | None:
    """The id at the padded positions of a batch."""
    padded = batch["input_ids"][batch["attention_mask"] == 0]
    return int(padded[0]) if padded.numel() else None


def _padding_id_of(subject: Subject) -> int | None:
    """The id that the trainer's collator pads with, else the model's."""
    found = getattr(getattr(subject.trainer, "data_collator", None), "pad_token_id", None)
    return found if isinstance(found, int) else pad_token_id(subject.model)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
