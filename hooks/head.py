"""The model's head as a function of hidden states: measured through the model's own forward, and raw.

The measured head runs the model's own code with its backbone replaced by one that answers the given hidden states, so
softcap, scale, bias and adapters are whatever the architecture really does. The raw head is ``lm_head.weight`` alone,
which is what fused losses read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.errors import UnsupportedTrainerError
from driftscope.spectrum import Logits

MODEL_HEAD = "model"
RAW_HEAD = "raw"


def causal_lm(model: nn.Module) -> Any:
    """The causal language model inside wrappers of PEFT."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_name(inner: Any) -> str:
    """Attribute under which the causal model keeps its backbone.

    Raises UnsupportedTrainerError where there is none.
    """
    name = getattr(inner, "base_model_prefix", "") or "model"
    for candidate in (name, "model", "transformer"):
        if isinstance(inner._modules.get(candidate), nn.Module):
            return str(candidate)
    raise UnsupportedTrainerError(
        f"{type(inner).__name__} has no backbone under {name!r}: the hidden states that feed the head are not found. "
        "Attach to a causal language model of transformers."
    )


class _Answer(nn.Module):
    """A backbone that answers fixed hidden states, whatever it is asked."""

    def __init__(self, backbone: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__["_backbone"] = backbone
        self.__dict__["_hidden"] = hidden

    def __getattr__(self, name: str) -> Any:  # whatever else the model asks its backbone
        return getattr(self.__dict__["_backbone"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.__dict__["_hidden"])


@contextmanager
def _eval_head(inner: Any) -> Iterator[None]:
    """The output head without dropout, its mode restored afterwards (an adapter on the head may have dropout)."""
    head = inner.get_output_embeddings()
    modules = [m for m in head.modules() if m.training] if head is not None else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


@contextmanager
def backbone_answers(inner: Any, hidden: Tensor) -> Iterator[None]:
    """Inside, the model's backbone answers ``hidden`` (B, L, D), whatever it is asked."""
    name = backbone_name(inner)
    backbone = inner._modules[name]
    inner._modules[name] = _Answer(backbone, hidden)
    try:
        yield
    finally:
        inner._modules[name] = backbone


def model_head(inner: Any, autocast: Callable[[], Any], forward: Callable[..., Any] | None = None) -> Logits:
    """(n, D) hidden states -> (n, V) logits by the model's own forward, its backbone answering the hidden states.

    ``forward``: which forward, where the instance's own is replaced at the moment.
    """

    def head(hidden_ND: Tensor) -> Tensor:
        ids = torch.zeros((1, hidden_ND.shape[0]), dtype=torch.long, device=hidden_ND.device)
        with autocast(), _eval_head(inner), backbone_answers(inner, hidden_ND[None]):
            logits: Tensor = (forward or inner.forward)(input_ids=ids, use_cache=False).logits[0]
        return logits

    return head


def raw_head(inner: Any, autocast: Callable[[], Any]) -> Logits:
    """(n, D) hidden states -> (n, V) logits by ``lm_head.weight`` and bias alone."""

    def head(hidden_ND: Tensor) -> Tensor:
        lm_head = inner.lm_head if hasattr(inner, "lm_head") else inner.get_output_embeddings()
        with autocast():
            return torch.nn.functional.linear(hidden_ND, lm_head.weight, getattr(lm_head, "bias", None))

    return head


@dataclass(frozen=True)
class HeadTransform:
    """What the model does between ``lm_head.weight`` and its logits, as measured on sample tokens."""

    softcap: float | None = None
    scale: float = 1.0
    adapter: bool = False
    other: bool = False
    joined: bool = True  # softcap and scale alone turn the raw logits into the model's
    difference: float = 0.0  # |measured - raw| / |measured|

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.scale == 1.0 and not self.adapter and not self.other

    @property
    def cause(self) -> str:
        """Cause id of a path that leaves the transform out."""
        return "head_adapter" if self.adapter and self.softcap is None and self.scale == 1.0 else "logit_transform"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_transform(
    inner: Any, measured: Logits, raw: Logits, hidden_ND: Tensor, dtype: torch.dtype
) -> HeadTransform:
    """Compare the model's logits with the raw ones on a few tokens, and name the transform that joins them.

    dtype: what the head computes in; differences within its rounding are none.
    """
    sample = hidden_ND[:16]
    logits, plain = measured(sample).double(), raw(sample).double()
    size = float(logits.norm()) or 1.0
    tolerance = 4 * torch.finfo(dtype).eps
    difference = float((logits - plain).norm()) / size
    if difference <= tolerance:
        return HeadTransform(difference=difference)
    config = inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config
    softcap = getattr(config, "final_logit_softcapping", None)
    adapter = _has_adapter(inner)
    for scale in (1.0, *_configured_scales(config), _slope(logits, plain, softcap)):
        made = softcap * torch.tanh(scale * plain / softcap) if softcap else scale * plain
        if float((logits - made).norm()) / size <= 4 * tolerance:
            return HeadTransform(softcap, scale, adapter, difference=difference)
    return HeadTransform(softcap, 1.0, adapter, other=not adapter, joined=False, difference=difference)


def _configured_scales(config: Any) -> list[float]:
    """Factors on the logits that a model's configuration may name (Cohere, Granite, Falcon-H1 and others)."""
    names = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    found = [float(value) for name in names if (value := getattr(config, name, None))]
    return [*found, *(1.0 / value for value in found)]


def _slope(logits: Tensor, plain: Tensor, softcap: float | None) -> float:
    """The factor between raw logits and those before the softcap, from entries that the cap does not saturate."""
    if softcap:
        open_ = logits.abs() < 0.9 * softcap
        logits, plain = torch.atanh(logits[open_] / softcap) * softcap, plain[open_]
    return float((logits * plain).sum() / (plain * plain).sum())


def _has_adapter(inner: Any) -> bool:
    head = inner.get_output_embeddings()
    names = [name for name, _ in head.named_parameters()] if head is not None else []
    return any("lora_" in name or "modules_to_save" in name for name in names)
