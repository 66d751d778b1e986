"""Shadow paths: TRL's own loss code and Liger's, run on the captured log-probs, at no cost of the model.

Each gives its real loss and, by autograd, its real token coefficients; the trainer's state and metrics stay as they
were, because the code runs on a shallow copy.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from driftscope.batch import Coefficients
from driftscope.hooks import adapters
from driftscope.kernels import liger


def reference_algebra(
    trainer: Any, inputs: adapters.Inputs, logps_BT: Tensor, entropies_BT: Tensor, *, bonus: float
) -> Coefficients:
    """TRL's own ``_compute_loss`` on given log-probs (B, T): its loss and its coefficients.

    ``bonus``: the entropy coefficient in force when the batch was trained on.
    """
    logps = logps_BT.detach().clone().requires_grad_(True)
    entropies = entropies_BT.detach().clone().requires_grad_(bonus != 0.0)
    loss = trl_loss(trainer, inputs, logps, entropies, bonus=bonus)
    return _differentiate(loss, logps, entropies if bonus != 0.0 else None)


def trl_loss(trainer: Any, inputs: adapters.Inputs, logps: Tensor, entropies: Tensor, *, bonus: float) -> Tensor:
    """TRL's own loss of given log-probs and entropies (B, T), differentiable by both."""
    answers: dict[str, Any] = {"aux_loss_enabled": False}
    if hasattr(trainer, "_entropy_bonus_enabled"):
        answers.update(entropy_coef=bonus, use_adaptive_entropy=False, _entropy_bonus_enabled=bonus != 0.0)
    last: Exception | None = None
    for answer in ((logps, entropies), (logps, entropies, None)):  # TRL 1.x adds the load-balancing loss
        twin = adapters.stand_in(
            trainer, _get_per_token_logps_and_entropies=lambda *_, answer=answer, **__: answer, **answers
        )
        try:
            with torch.enable_grad():
                loss: Tensor = twin._compute_loss(trainer.model, dict(inputs))
        except ValueError as error:  # the wrong number of values to unpack
            last = error
            continue
        return loss
    raise last or RuntimeError("TRL's loss gave no answer")


class LigerPath:
    """Liger's loss for one trainer: as TRL calls it where TRL has it, else as its user would call it."""

    def __init__(self, trainer: Any, inner: Any) -> None:
        self.trainer = trainer
        self.inner = inner
        module = next((m for name in adapters.LIGER_LOSS if (m := getattr(trainer, name, None)) is not None), None)
        self.module = liger.uncompiled(module) if module is not None else liger.build_loss(self._settings())

    def _settings(self) -> dict[str, Any]:
        settings = adapters.liger_settings(self.trainer)
        if adapters.has_liger_loss(self.trainer):  # TRL with a Liger loss leaves these to Liger's defaults
            settings.pop("importance_sampling_level")
        return settings

    def alone(self, inputs: adapters.Inputs, rank_mean_tokens: tuple[float, float] | None) -> Any:
        """Inside, the loss enters no collective: its normaliser over the ranks is answered from their token counts."""
        if rank_mean_tokens is None:
            return nullcontext()
        return liger.normalizer_over_ranks(self.module, rank_mean_tokens, token_counts(inputs))

    def algebra(self, inputs: adapters.Inputs, logps_BT: Tensor, hidden_BTD: Tensor) -> Coefficients:
        """Loss and coefficients of Liger's own loss function on given log-probs (B, T)."""
        logps = logps_BT.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            loss = self._call(liger.AlgebraOnly(self.module, logps), inputs, hidden_BTD)
        return _differentiate(loss, logps, None)

    def fused_call(self, inputs: adapters.Inputs, hidden_BTD: Tensor) -> tuple[float, Tensor]:
        """Loss and hidden gradient (B, T, D) of Liger's real fused call on given hidden states."""
        leaf = hidden_BTD.detach().clone().requires_grad_(True)
        with torch.enable_grad(), adapters.autocast(self.trainer):
            loss = self._call(self.module, inputs, leaf)
        (grad,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), grad

    def _call(self, loss_module: Any, inputs: adapters.Inputs, hidden_BTD: Tensor) -> Tensor:
        trainer = self.trainer
        if adapters.has_liger_loss(trainer):
            names = dict.fromkeys(adapters.LIGER_LOSS, loss_module)
            twin = adapters.stand_in(trainer, _get_last_hidden_state=lambda *_, **__: hidden_BTD, **names)
            loss: Tensor = twin.compute_liger_loss(self.inner, dict(inputs))
            return loss
        return self._call_directly(loss_module, inputs, hidden_BTD)

    def _call_directly(self, loss_module: Any, inputs: adapters.Inputs, hidden_BTD: Tensor) -> Tensor:
        """Liger's loss where TRL has none: with every input of the batch that Liger takes."""
        absent = [name for name, used in _beyond_liger(self.trainer).items() if used]
        if absent:
            raise NotImplementedError(f"it has no {' and no '.join(absent)}")
        accumulation = adapters.accumulation_steps(self.trainer)
        per_generation = getattr(self.trainer.args, "steps_per_generation", None) or accumulation
        lm_head = self.inner.get_output_embeddings()
        given: dict[str, Any] = {
            "_input": hidden_BTD,
            "lin_weight": lm_head.weight,
            "bias": getattr(lm_head, "bias", None),
            "selected_token_ids": inputs["completion_ids"],
            "attention_mask": adapters.policy_mask(inputs),
            "advantages": inputs["advantages"],
            "old_per_token_logps": inputs.get("old_per_token_logps"),
            "ref_per_token_logps": inputs.get("ref_per_token_logps"),
        }
        summed = self.trainer.loss_type in ("dapo", "cispo", "vespo")
        if liger.accepts(self.module, "vllm_is_ratio"):
            given["vllm_is_ratio"] = inputs.get("importance_sampling_ratio")
        if liger.accepts(self.module, "num_items_in_batch") and summed:
            given["num_items_in_batch"] = inputs["num_items_in_batch"] * accumulation / per_generation
        loss: Tensor = loss_module(**given)[0]
        return loss if "num_items_in_batch" in given else loss / accumulation


def token_counts(inputs: adapters.Inputs) -> tuple[float, float]:
    """Tokens of a micro-batch that the loss should train on, and all unmasked completion tokens."""
    counts = torch.stack([adapters.policy_mask(inputs).sum(), inputs["completion_mask"].sum()]).tolist()
    return float(counts[0]), float(counts[1])


def _beyond_liger(trainer: Any) -> dict[str, bool]:
    """Terms of TRL's loss that Liger's loss takes no input for, and whether the trainer uses them."""
    return {
        "off-policy sequence mask": getattr(trainer, "off_policy_mask_threshold", None) is not None,
        "top-entropy mask": getattr(trainer, "top_entropy_quantile", 1.0) < 1.0,
        "entropy bonus": bool(getattr(trainer, "_entropy_bonus_enabled", False)),
    }


def _differentiate(loss: Tensor, logps: Tensor, entropies: Tensor | None) -> Coefficients:
    wanted = [logps] if entropies is None else [logps, entropies]
    if not loss.requires_grad:
        return Coefficients(loss=float(loss), logps_BT=torch.zeros_like(logps))
    grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
    return Coefficients(
        loss=float(loss.detach()),
        logps_BT=grads[0].detach(),
        entropies_BT=grads[1].detach() if entropies is not None else None,
    )
