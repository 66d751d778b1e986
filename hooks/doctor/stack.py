"""The stack probe: which terms of the configured loss the installed TRL and Liger really compute.

Each feature is switched on in a real trainer on a tiny model; its real training step runs on a synthetic batch, and
the hidden gradient that it sends is compared with the one of the oracle, the loss algebra in float64. No version is
looked at, so a pair that nobody has seen is judged like any other. Everything runs on the CPU in float32.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftscope.doctor.facts import FeatureRow, Settings, StackTable, Status
from driftscope.errors import UsageError
from driftscope.hooks import adapters
from driftscope.hooks.doctor.features import Feature, Head, catalogue
from driftscope.hooks.doctor.stack_rig import Rig, Step, setting_names
from driftscope.hooks.doctor.stack_state import untouched
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, causal_lm, measure_transform, model_head, raw_head
from driftscope.spec import LossSpec

TOLERANCE = 1e-3
"""Relative error of the hidden gradient under which a path computes what a spec says: float32, one small batch."""
EFFECT = 0.1
"""Least relative difference that a feature must make on the synthetic batch to be judged."""
PACKAGES = ("trl", "liger_kernel", "transformers", "peft", "accelerate", "torch")
REFUSALS = (ValueError, NotImplementedError, AssertionError)
NO_LIGER_LOSS = (
    "this TRL has no Liger loss: its own loss (path 'reference') is what trains, with or without use_liger_kernel"
)


def probe_stack(settings: Settings | None = None, *, trainer: Any = None, model_config: Any = None) -> StackTable:
    """Try every feature of the GRPO loss on every loss path of the installed stack.

    settings: the configuration at hand; TRL's defaults without it. trainer: a GRPO trainer whose settings and head are
    taken instead; it is read, never run. model_config: a transformers configuration, for softcap and logit scale of a
    model that is not loaded. A few seconds on the CPU.

    Rows of path ``liger`` exist where the installed TRL has a Liger loss; where it has none there is one,
    ``configuration``, that says so. Factors and errors are those of the synthetic batch, whose token-level importance
    sampling ratio is about 0.8 on average.

    Raises ``UsageError`` for settings that are not GRPO's, ``UnsupportedTrainerError`` for a trainer that is not.
    """
    started = time.perf_counter()
    if trainer is not None:
        adapters.require_grpo(trainer)
        settings = _settings_of(trainer)
    settings = _with_defaults(settings or Settings())
    if settings.trainer != "grpo":
        raise UsageError(
            f"trainer={settings.trainer!r}: the stack probe compares the loss paths of TRL's GRPO; give settings of "
            "trainer='grpo', or leave the probe out."
        )
    head = _head_of(trainer) if trainer is not None else _configured_head(model_config)
    tools = bool(getattr(trainer, "tools", None))
    processes = int(getattr(getattr(trainer, "accelerator", None), "num_processes", 1))
    features = catalogue(settings, head, tools=tools, processes=processes)
    from trl import GRPOTrainer

    has_liger = hasattr(GRPOTrainer, "compute_liger_loss")
    live = "liger" if has_liger and settings.get("use_liger_kernel", False) else "reference"
    why = _cannot_run()
    rows = [_unavailable(f, "reference", why) for f in features] if why else list(_measure(features, has_liger))
    if not has_liger:
        rows.append(_unavailable(features[-1], "liger", NO_LIGER_LOSS))
    return StackTable(rows=tuple(rows), live=live, versions=_versions(), seconds=time.perf_counter() - started)


def _measure(features: tuple[Feature, ...], has_liger: bool) -> Iterator[FeatureRow]:
    with untouched(), tempfile.TemporaryDirectory(prefix="driftscope-stack-") as scratch:
        rig = Rig(Path(scratch))
        for feature in features:
            own = _row(rig, feature, "reference")
            if _unknown_loss_type(feature, own):
                continue
            if has_liger:
                yield _row(rig, feature, "liger")
            yield own


def _unknown_loss_type(feature: Feature, own: FeatureRow) -> bool:
    """Whether the installed TRL has no such loss type, and nobody asks for it."""
    return feature.name.startswith("loss_type=") and own.status == "refused" and not feature.in_use


def _row(rig: Rig, feature: Feature, path: str) -> FeatureRow:
    """Run one feature on one path."""
    lacking = [name for name in feature.needs if name not in setting_names()]
    if lacking:
        return _unavailable(feature, path, f"this TRL has no {' and no '.join(lacking)}")
    try:
        return _judge(feature, path, rig.step(feature, path))
    except UsageError as error:  # the oracle's own: a term that it does not know
        return _unavailable(feature, path, f"the oracle cannot judge it: {error}")
    except REFUSALS as error:
        return _without_numbers(feature, path, "refused", _one_line(error))
    except Exception as error:  # noqa: BLE001 - whatever upstream raises, the other rows are measured
        return _unavailable(feature, path, f"{type(error).__name__}: {_one_line(error)}")


def _judge(feature: Feature, path: str, step: Step) -> FeatureRow:
    """Compare the measured hidden gradient with the oracle's, the feature on and off."""
    on = step.expected(step.spec.replace(**feature.on), MODEL_HEAD)
    if not float(on.norm()) > 0:
        return _unavailable(feature, path, "the configured loss has no gradient on the synthetic batch")
    off = _off(feature, step, step.spec)
    if off is not None and (effect := _distance(off, on)) < EFFECT:
        return _unavailable(feature, path, f"the synthetic batch cannot tell: on and off differ by {effect:.1%}")
    error = _distance(step.grad_BTD, on)
    status: Status = "honoured" if error <= TOLERANCE else "differs"
    if status == "differs" and off is not None and _distance(step.grad_BTD, off) <= TOLERANCE:
        status = "dropped"
    return FeatureRow(
        feature=feature.name,
        path=path,
        status=status,
        factor=float(step.grad_BTD.norm() / on.norm()),
        error=error,
        in_use=feature.in_use,
    )


def _off(feature: Feature, step: Step, spec: LossSpec) -> Tensor | None:
    """The oracle's hidden gradient without the feature, or ``None`` where the feature has no opposite."""
    if feature.raw_off:
        return step.expected(spec, RAW_HEAD)
    return step.expected(spec.replace(**feature.off), MODEL_HEAD) if feature.off is not None else None


def _distance(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found - wanted).norm() / wanted.norm())


def _unavailable(feature: Feature, path: str, why: str) -> FeatureRow:
    return _without_numbers(feature, path, "unavailable", why)


def _without_numbers(feature: Feature, path: str, status: Status, message: str) -> FeatureRow:
    return FeatureRow(feature=feature.name, path=path, status=status, message=message, in_use=feature.in_use)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _with_defaults(settings: Settings) -> Settings:
    """The settings over the installed GRPOConfig's own defaults."""
    from trl import GRPOConfig

    own = {f.name: f.default for f in dataclasses.fields(GRPOConfig) if f.default is not dataclasses.MISSING}
    given = {name: value for name, value in settings.values.items() if value is not None}
    return dataclasses.replace(settings, values={**own, **given})


def _settings_of(trainer: Any) -> Settings:
    args = trainer.args
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if hasattr(args, f.name)}
    return Settings(trainer="grpo", values=values, source=type(args).__name__)


def _head_of(trainer: Any) -> Head:
    """What the trainer's own model does to its logits: measured on random hidden states, without its RNG."""
    inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
    configured = _configured_head(getattr(inner, "config", None))
    try:
        weight = inner.get_output_embeddings().weight
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(8, weight.shape[1], generator=draw).to(weight.device, weight.dtype)
        own, raw = (make(inner, lambda: adapters.autocast(trainer)) for make in (model_head, raw_head))
        found = measure_transform(inner, own, raw, hidden, adapters.compute_dtype(trainer, hidden))
    except Exception:  # noqa: BLE001 - a sharded head, an unusual model: the configuration still speaks
        return configured
    adapter = found.adapter or any("lora_" in name for name, _ in inner.get_output_embeddings().named_parameters())
    return Head(softcap=found.softcap is not None, scale=found.scale != 1.0, adapter=adapter)


def _configured_head(config: Any) -> Head:
    """Softcap and scale as a transformers configuration names them; adapters are not in it."""
    if config is None:
        return Head()
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scales = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    return Head(
        softcap=bool(getattr(text, "final_logit_softcapping", None)),
        scale=any(getattr(text, name, None) not in (None, 1, 1.0) for name in scales),
    )


def _cannot_run() -> str | None:
    """Why the probe cannot run in this process, or ``None``."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "several processes: Liger's loss would reduce over all of them; run `driftscope doctor` in one process"
    return None


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
