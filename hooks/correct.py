"""The correct mode: the trainer's own algebra on log-probs from a fused linear head.

TRL's ``_compute_loss`` is what trains; only where it asks for per-token log-probs, they come from the fused head,
which never holds the logits. So every loss type and option of the installed TRL works, with the memory of a fused
path.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftscope.errors import UnsupportedTrainerError
from driftscope.hooks import adapters
from driftscope.hooks.head import HeadTransform, backbone_name, causal_lm, measure_transform, model_head
from driftscope.hooks.sharding import FUSED_HEAD, head_alone, sharding, trained_whole
from driftscope.kernels import fused_linear_logprobs


class _Scored(NamedTuple):
    """What the causal model answers while its forward is the fused one; a tuple, so that FSDP finds the tensors."""

    logps: Tensor
    entropies: Tensor | None


def effective_weight(head: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (V, D) and bias of an output head as its forward uses them, adapters included; differentiable.

    Raises UnsupportedTrainerError for a head whose forward is no linear map of this form.
    """
    active = getattr(head, "active_adapters", None) or [getattr(head, "active_adapter", "default")]
    saved = getattr(head, "modules_to_save", None)
    if saved is not None:  # a fully trained copy of the head
        chosen = [saved[name] for name in active if name in saved and not getattr(head, "disable_adapters", False)]
        return _linear(chosen[0] if chosen else head.original_module)
    if not hasattr(head, "lora_A"):
        return _linear(head)
    weight, bias = _linear(head.get_base_layer())
    if head.disable_adapters or head.merged:
        return weight, bias
    for name in active:
        if name not in head.lora_A:
            continue
        dropout = head.lora_dropout[name]
        if head.training and getattr(dropout, "p", 0.0) > 0.0:
            raise UnsupportedTrainerError(
                f"lora_dropout={dropout.p} on the output head: its forward is random, no fixed weight stands for it. "
                "Set lora_dropout=0 for lm_head, or leave lm_head out of target_modules."
            )
        delta = trained_whole(head.lora_B[name].weight) @ trained_whole(head.lora_A[name].weight)
        weight = weight + (head.scaling[name] * delta).to(weight.dtype)
    return weight, bias


def _linear(module: Any) -> tuple[Tensor, Tensor | None]:
    bias = getattr(module, "bias", None)
    return trained_whole(module.weight), trained_whole(bias) if bias is not None else None


class FusedHead:
    """The fused head of one trainer's models: log-probs and entropies from hidden states."""

    def __init__(self, trainer: Any, workspace_bytes: int | None = None) -> None:
        self.trainer = trainer
        self.workspace_bytes = workspace_bytes
        self._transforms: dict[int, HeadTransform] = {}

    def score(
        self, inner: Any, hidden_BTD: Tensor, targets_BT: Tensor, mask_BT: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies (B, T) of the targets; 0 where the mask is. Differentiable by hidden and head."""
        transform = self.transform(inner, hidden_BTD)
        weight, bias = effective_weight(inner.get_output_embeddings())
        with adapters.autocast(self.trainer):
            return fused_linear_logprobs(
                hidden_BTD,
                weight,
                targets_BT,
                bias=bias,
                temperature=float(self.trainer.temperature),
                softcap=transform.softcap,
                logit_scale=transform.scale,
                with_entropy=entropy,
                mask=mask_BT,
                workspace_bytes=self.workspace_bytes,
            )

    def transform(self, inner: Any, hidden_BTD: Tensor) -> HeadTransform:
        """What the model does to its logits, measured once.

        Raises UnsupportedTrainerError where it is neither a scale nor a softcap.
        """
        if id(inner) not in self._transforms:

            def effective(hidden: Tensor) -> Tensor:
                weight, bias = effective_weight(inner.get_output_embeddings())
                with adapters.autocast(self.trainer):
                    return torch.nn.functional.linear(hidden, weight, bias)

            sample = hidden_BTD.detach().reshape(-1, hidden_BTD.shape[-1])
            dtype = adapters.compute_dtype(self.trainer, sample)
            forward = partial(type(inner).forward, inner)
            own = model_head(inner, lambda: adapters.autocast(self.trainer), forward)
            with head_alone(inner):
                found = measure_transform(inner, own, effective, sample, dtype)
            if not found.joined:
                raise UnsupportedTrainerError(
                    f"{type(inner).__name__} makes its logits in a way that the fused head does not know "
                    f"(relative difference {found.difference:.2g}). Use mode='watch' and TRL's own path."
                )
            self._transforms[id(inner)] = found
        return self._transforms[id(inner)]


class CorrectedLoss:
    """Stands where a trainer computes its per-token log-probs, and routes its loss to TRL's own algebra."""

    def __init__(self, trainer: Any, workspace_bytes: int | None = None) -> None:
        why = FUSED_HEAD.get(sharding(trainer))
        if why is not None:
            raise UnsupportedTrainerError(f"mode='correct': {why[0]}. {why[1]}")
        self.trainer = trainer
        self.head = FusedHead(trainer, workspace_bytes)
        self._own = trainer._get_per_token_logps_and_entropies
        self._with_aux = "compute_aux_loss" in inspect.signature(self._own).parameters
        effective_weight(causal_lm(trainer.accelerator.unwrap_model(trainer.model)).get_output_embeddings())

    def loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of ``compute_loss``: never the fused Liger path, whatever ``use_liger_kernel`` says."""
        return self.trainer._compute_loss(model, inputs)

    def logps(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **extra: Any,
    ) -> tuple[Any, ...]:
        """In place of ``_get_per_token_logps_and_entropies``: the same results from the fused head.

        Batches with images, and mixture models that want their router's loss, go TRL's own way.
        """
        if any(value is not None and value is not False for value in extra.values()):
            return self._own(  # type: ignore[no-any-return]
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **extra
            )
        size = batch_size or input_ids.size(0)
        parts = [
            self._score(model, ids, mask, logits_to_keep, compute_entropy)
            for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True)
        ]
        logps = torch.cat([p.logps for p in parts])
        entropies = torch.cat([p.entropies for p in parts if p.entropies is not None]) if compute_entropy else None
        return (logps, entropies, None) if self._with_aux else (logps, entropies)

    def _score(self, model: Any, ids: Tensor, mask: Tensor, keep: int, entropy: bool) -> _Scored:
        inner = causal_lm(self.trainer.accelerator.unwrap_model(model))
        with self._fused_forward(inner, ids[:, -keep:], mask[:, -keep:], entropy):
            scored: _Scored = model(input_ids=ids, attention_mask=mask, use_cache=False)
        return scored

    @contextmanager
    def _fused_forward(self, inner: Any, targets_BT: Tensor, mask_BT: Tensor, entropy: bool) -> Iterator[None]:
        """Let the causal model answer with scores, however it is wrapped."""
        keep = targets_BT.shape[1]

        def forward(*args: Any, **kwargs: Any) -> _Scored:
            with adapters.autocast(self.trainer):
                hidden = inner._modules[backbone_name(inner)](*args, **kwargs).last_hidden_state
            return _Scored(*self.head.score(inner, hidden[:, -keep - 1 : -1], targets_BT, mask_BT, entropy=entropy))

        before = inner.__dict__.get("forward")
        inner.forward = forward
        try:
            yield
        finally:
            if before is None:
                del inner.forward
            else:
                inner.forward = before
