"""What is measured on the policy itself before the run, with its own prompts, and without a trace.

Shapes: B sequences, T completion tokens, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from driftscope import is_ratio
from driftscope.doctor.facts import ModelFacts, Settings
from driftscope.hooks import adapters
from driftscope.hooks.doctor.isolation import as_it_was, random_state
from driftscope.hooks.doctor.policy_pass import CannotBeHad, Sampled, completion_logps, in_float32, sample_completions
from driftscope.rules._settings import sampling_values, truncates

WEIGHTS_A_TENSOR = 1 << 16
STEP_IS_RATE = ("adam", "lion")  # optimizers whose first step has size learning_rate
T = TypeVar("T")


class _Facts:
    """Facts as they come in; what fails is unavailable, with the reason."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unavailable: dict[str, str] = {}

    def take(self, name: str, measure: Callable[[], T]) -> T | None:
        try:
            value = measure()
        except Exception as error:  # noqa: BLE001 - one fact that cannot be had does not hide the others
            self.unavailable[name] = str(error) if isinstance(error, CannotBeHad) else f"{_short(error)}"
            return None
        self.values[name] = value
        return value


def model_facts(trainer: Any, settings: Settings) -> ModelFacts:
    """dtype, rounding, sampling and reference of a trainer's model before its first step.

    On up to 8 of the trainer's own prompts (256 tokens each), with two completions of up to 32 tokens each that the
    model samples itself. Parameters, gradients, random states, modes, adapters and metrics stay as they are. What does
    not apply or cannot be had is ``None``, the latter with its reason in ``unavailable``.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    out = _Facts()
    dtypes = _dtypes(model)
    out.values |= {
        "model_type": str(getattr(getattr(model, "config", None), "model_type", "")),
        "dtypes": dtypes,
        "dtype": max(dtypes, key=lambda name: dtypes[name], default=""),
    }
    sharded = _sharded(trainer)
    if sharded is not None:
        names = ("lost_update_share", "kept_mass", "logp_noise", "reference_kl")
        return ModelFacts(**out.values, unavailable=dict.fromkeys(names, sharded))
    out.take("lost_update_share", lambda: _lost_update_share(model, settings))
    if settings.trainer == "grpo":
        with random_state(), torch.no_grad(), as_it_was(model, getattr(trainer, "ref_model", None)):
            _measure_policy(trainer, model, settings, out)
    values = {name: value for name, value in out.values.items() if name != "sample"}
    return ModelFacts(**values, unavailable=out.unavailable)


def _measure_policy(trainer: Any, model: Any, settings: Settings, out: _Facts) -> None:
    made = out.take("sample", lambda: sample_completions(trainer, model, settings))
    if made is None:
        why = f"no completions could be sampled: {out.unavailable.pop('sample')}"
        names = ["logp_noise", "log_collision"]
        names += ["kept_mass"] if truncates(settings) else []
        names += ["reference_kl"] if float(settings.get("beta", 0.0)) else []
        out.unavailable.update(dict.fromkeys(names, why))
        return
    spread = out.take("spread", lambda: _spread(trainer, model, made, settings))
    out.values.pop("spread", None)
    if spread is not None:
        out.values |= spread
    elif "spread" in out.unavailable:
        why = out.unavailable.pop("spread")
        out.unavailable |= {"kept_mass": why, "log_collision": why}
    own = out.take("logps", lambda: completion_logps(trainer, model, made))
    out.values.pop("logps", None)
    if own is None:
        why = out.unavailable.pop("logps")
        out.unavailable |= {"logp_noise": why, "reference_kl": why}
        return
    out.take("logp_noise", lambda: _logp_noise(trainer, model, made, own))
    if float(settings.get("beta", 0.0)):
        found = out.take("reference_kl", lambda: _reference_kl(trainer, model, made, own))
        if found is not None:
            out.values["reference_kl"], out.values["reference"] = found


def _dtypes(model: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for p in model.parameters():
        if p.requires_grad:
            name = str(p.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + p.numel()
    return found


def _sharded(trainer: Any) -> str | None:
    for flag, name in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        if getattr(trainer, flag, False):
            return f"{name} shards the weights: they cannot be looked at in one process"
    return None


@torch.no_grad()
def _lost_update_share(model: Any, settings: Settings) -> float | None:
    """Share of the trainable weights w for which w + lr and w - lr (the mean of both) round back to w."""
    rate, optim = float(settings.get("learning_rate", 0.0)), str(settings.get("optim", "adamw_torch")).lower()
    if not any(name in optim for name in STEP_IS_RATE):
        raise CannotBeHad(f"the size of {optim}'s first step is not the learning rate")
    lost, count = 0.0, 0
    for p in model.parameters():
        if not p.requires_grad or not p.is_floating_point() or p.numel() == 0:
            continue
        flat = p.detach().reshape(-1)
        w = flat[:: -(-flat.numel() // WEIGHTS_A_TENSOR)]
        same = ((w + rate) == w).double().mean() + ((w - rate) == w).double().mean()
        lost, count = lost + p.numel() * float(same) / 2, count + p.numel()
    if not count or rate <= 0.0:
        return None
    return lost / count


def _spread(trainer: Any, model: Any, made: Sampled, settings: Settings) -> dict[str, float | None]:
    """Kept mass and log collision probability, means over the completions' tokens, one sequence at a time."""
    values = sampling_values(settings)
    kept: list[Tensor] = []
    collisions: list[Tensor] = []
    length = made.mask_BT.shape[1]
    for ids, attention, mask_T in zip(made.ids, made.attention, made.mask_BT.bool(), strict=True):
        real = attention.bool()
        with adapters.autocast(trainer):
            logits = model(input_ids=ids[real][None], attention_mask=attention[real][None], use_cache=False).logits[0]
        completion = int(mask_T[:length].sum())
        rows = logits[-completion - 1 : -1].float() / values["temperature"]
        log_p = rows.log_softmax(-1)
        collisions.append((2 * log_p).logsumexp(-1).double())
        if truncates(settings):
            kept.append(
                is_ratio.kept_mass(log_p, top_p=values["top_p"], top_k=int(values["top_k"]), min_p=values["min_p"])
            )
    return {
        "kept_mass": float(torch.cat(kept).log().mean().exp()) if kept else None,
        "log_collision": float(torch.cat(collisions).mean()),
    }


def _logp_noise(trainer: Any, model: Any, made: Sampled, own_N: Tensor) -> float:
    """Standard deviation of the tokens' log-probs against float32 weights and arithmetic."""
    with in_float32(model):
        exact_N = completion_logps(trainer, model, made, exact=True)
    return float((own_N - exact_N).square().mean().sqrt())


def _reference_kl(trainer: Any, model: Any, made: Sampled, own_N: Tensor) -> tuple[float, str]:
    """Mean k3 KL, exp(d) - d - 1 with d = ref - policy, where TRL takes its reference from; and from where."""
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        words = f"the model loaded from {getattr(reference.config, '_name_or_path', '') or 'its configuration'}"
        ref_N = completion_logps(trainer, reference, made)
    elif hasattr(model, "peft_config"):
        adapter = "ref" if "ref" in model.peft_config else None
        words = f"the adapter {adapter!r}" if adapter else "the model without its adapter"
        with _use_adapter(trainer)(model, adapter_name=adapter):
            ref_N = completion_logps(trainer, model, made)
    else:
        raise CannotBeHad("the trainer has no reference model, though beta is not 0")
    delta_N = ref_N - own_N
    return float((delta_N.exp() - delta_N - 1).mean()), words


def _use_adapter(trainer: Any) -> Any:
    """TRL's own way to switch to the reference adapter, from the module of the trainer's class."""
    for cls in type(trainer).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "use_adapter", None)
        if found is not None:
            return found
    raise CannotBeHad("this TRL has no use_adapter, through which it takes the reference from an adapter")


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def copy_facts(trainer: Any) -> ModelFacts:
    """What a shrunk random copy (``build_twin``) tells of the model: its architecture, and which dtypes train."""
    dtypes = _dtypes(trainer.accelerator.unwrap_model(trainer.model))
    return ModelFacts(
        model_type=str(getattr(trainer.model.config, "model_type", "")),
        copy=True,
        dtypes=dtypes,
        dtype=max(dtypes, key=lambda name: dtypes[name], default=""),
    )
