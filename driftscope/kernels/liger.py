"""Liger-Kernel's GRPO loss, taken apart: its real fused call, and its algebra on given log-probs.

Works on whatever Liger is installed (0.6 to 0.8), and on the copy that TRL 1.13 vendors: the autograd function is
found through the loss module, its arguments through its signature.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def build_loss(settings: Mapping[str, Any]) -> nn.Module:
    """Liger's GRPO loss module with those of ``settings`` that its constructor knows, not compiled.

    Raises ImportError where Liger is not installed.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    known = inspect.signature(LigerFusedLinearGRPOLoss.__init__).parameters
    module: nn.Module = LigerFusedLinearGRPOLoss(**{k: v for k, v in settings.items() if k in known})
    return uncompiled(module)


def uncompiled(module: nn.Module) -> nn.Module:
    """A copy of a Liger loss module that runs without torch.compile."""
    twin = copy.copy(module)
    if hasattr(twin, "compiled"):
        vars(twin)["compiled"] = False
    return twin


def layer_kernels_off(model_type: str) -> dict[str, bool]:
    """A ``liger_kernel_config`` with every kernel for the layers of this architecture off.

    They need a GPU, and are put into transformers' classes for the rest of the process. Raises ImportError where Liger
    is not installed.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    known = inspect.signature(apply).parameters if apply is not None else {}
    return {name: False for name, p in known.items() if isinstance(p.default, bool)}


def accepts(module: nn.Module, argument: str) -> bool:
    """Whether the module's forward takes this argument."""
    return argument in inspect.signature(type(module).forward).parameters


class AlgebraOnly(nn.Module):
    """Stands where a Liger loss module stands and answers with Liger's own loss on given log-probs.

    logps_BT: log-probs, a leaf that requires grad. The caller's arguments are used as they come, so what is measured
    is the caller's real call: a mask, a ratio or a normaliser that it leaves out is left out here.
    """

    def __init__(self, module: nn.Module, logps_BT: Tensor) -> None:
        super().__init__()
        self.__dict__["_module"] = module
        self.__dict__["_logps_BT"] = logps_BT
        self.__dict__["call"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        module: nn.Module = self.__dict__["_module"]
        logps_BT: Tensor = self.__dict__["_logps_BT"]
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        call = {k: v for k, v in bound.arguments.items() if k != "self"}
        self.__dict__["call"] = call
        loss_fn = _function_class(module).ppo_loss_fn
        known = inspect.signature(loss_fn).parameters
        given: dict[str, Any] = {k: v for k, v in vars(module).items() if k in known}
        given.update({k: v for k, v in call.items() if k in known and k != "selected_token_ids"})
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            given[name] = call[name].float() if call.get(name) is not None else None
        given["attention_mask"] = given["full_attention_mask"] = call["attention_mask"]
        if "log_probs" in known:  # up to 0.7 the loss gathers them itself from (B, T, V)
            given["log_probs"] = logps_BT.unsqueeze(-1)
            given["selected_token_ids"] = torch.zeros_like(call["selected_token_ids"])
        else:
            given["per_token_logps"] = logps_BT
        loss, metrics = loss_fn(**given)
        return loss, metrics


def refused_loss_types(loss_types: Iterable[str]) -> dict[str, str]:
    """Those of the loss types that the installed Liger's loss refuses, with its message, found by trying.

    Raises ImportError where Liger is not installed.
    """
    refused = {}
    ones = torch.ones(1, 2)
    for loss_type in loss_types:
        settings = {"loss_type": loss_type, "beta": 0.0, "use_ref_model": False, "max_completion_length": 2}
        try:
            module = build_loss(settings)
            with normalizer_over_ranks(module, (2.0, 2.0), (2.0, 2.0)):
                tried = AlgebraOnly(module, torch.zeros(1, 2, requires_grad=True))
                tried(ones, ones, torch.zeros(1, 2, dtype=torch.long), ones, torch.ones(1))
        except (ValueError, NotImplementedError) as error:
            refused[loss_type] = str(error)
    return refused


@contextmanager
def normalizer_over_ranks(
    module: nn.Module, rank_mean_tokens: tuple[float, float], own: tuple[float, float]
) -> Iterator[None]:
    """Inside, Liger's token normaliser is answered from known counts, where it would reduce them over all ranks.

    rank_mean_tokens, own: tokens of the micro-batch with the tool mask and without it, the mean over ranks and this
    rank's. A shadow must not enter a collective: a rank whose probe has failed would leave the others waiting.
    Raises ``LookupError`` inside for a mask of another size.
    """
    owner = next(
        (c for c in _function_class(module).__mro__ if "_compute_dapo_normalizer" in vars(c)),
        None,
    )
    if owner is None:
        yield
        return
    upstream = vars(owner)["_compute_dapo_normalizer"]

    def answer(attention_mask: Tensor, num_items_in_batch: Any = None) -> Tensor:
        if num_items_in_batch is not None:  # no collective then
            done: Tensor = upstream.__func__(attention_mask, num_items_in_batch)
            return done
        size = float(attention_mask.sum())
        for mine, mean in zip(own, rank_mean_tokens, strict=True):
            if size == mine:
                return torch.tensor(mean, dtype=torch.float32, device=attention_mask.device).clamp(min=1.0)
        raise LookupError(f"Liger normalises by {size:g} tokens, which are not those of the batch ({own})")

    owner._compute_dapo_normalizer = staticmethod(answer)
    try:
        yield
    finally:
        owner._compute_dapo_normalizer = upstream


def _function_class(module: nn.Module) -> Any:
    """The autograd function behind a Liger loss module: the one in its namespace that has a loss of its own."""
    found: list[Any] = [
        value
        for value in type(module).forward.__globals__.values()
        if isinstance(value, type)
        and issubclass(value, torch.autograd.Function)
        and "ppo_loss_fn" in vars(value)
        and not getattr(vars(value)["ppo_loss_fn"], "__isabstractmethod__", False)
    ]
    if len(found) != 1:
        raise LookupError(
            f"{type(module).__name__} has {len(found)} loss functions where one was expected; "
            "its algebra cannot be separated from its fused call."
        )
    return found[0]
