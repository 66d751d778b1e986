"""How a trainer's weights and gradients lie over its processes, and the output head made whole for the head pass.

What is found here comes from the real objects: the wrapped model, its parameters, the engine. Before training has
prepared them, accelerate's plugins say what they will be.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]

WEIGHTS: dict[Kind, str] = {
    "fsdp1": "FSDP shards the weights",
    "fsdp2": "FSDP shards the weights",
    "zero3": "DeepSpeed ZeRO-3 partitions the weights",
}
FUSED_HEAD: dict[Kind, tuple[str, str]] = {
    "fsdp1": (
        "FSDP version 1 keeps the output head in a flat shard, which the fused head cannot train through",
        "Set fsdp_version: 2 (accelerate config), or use mode='watch'.",
    ),
    "zero3": (
        "DeepSpeed ZeRO-3 has the output head whole only in the head module's own forward and backward, which the "
        "fused head does not run",
        "Use ZeRO-2 or FSDP2, or mode='watch'.",
    ),
}
"""Why mode='correct' cannot train there, and what to do."""
STEPPED = "an optimizer steps inside the backward"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LIBRARIES = ("torch.distributed", "deepspeed")  # whose hooks gather parameters


def sharding(trainer: Any) -> Kind:
    """Which of the field's schemes holds the trainer's weights and gradients."""
    wrapped = getattr(trainer, "model_wrapped", None) or trainer.model
    stage = _zero_stage(trainer, wrapped)
    if stage:
        return ("zero1", "zero2", "zero3")[stage - 1]
    version = _fsdp_version(trainer, wrapped)
    if version:
        return "fsdp2" if version == 2 else "fsdp1"
    return "ddp" if trainer.accelerator.num_processes > 1 else "none"


def steps_in_backward(trainer: Any) -> bool:
    """Whether an optimizer steps inside a backward: DeepSpeed's engine, and optimizers in hooks of the parameters."""
    return _is_deepspeed(trainer) or _stepped(trainer.model)


def split_weights(trainer: Any) -> str | None:
    """Why this process has not the whole weights that a window's first micro-batch was trained on, or ``None``."""
    why = WEIGHTS.get(sharding(trainer))
    if why is None and _stepped(trainer.model):
        return STEPPED
    if why is None and _is_deepspeed(trainer) and trainer.args.gradient_accumulation_steps == 1:
        return "DeepSpeed steps the optimizer inside the backward"
    return why


def split_gradients(trainer: Any) -> str | None:
    """Why gradients of this trainer cannot be read whole from one process, or ``None``."""
    kind = sharding(trainer)
    if _is_deepspeed(trainer):
        return "DeepSpeed partitions the gradients"
    if kind.startswith("fsdp"):
        return "FSDP shards the gradients"
    if trainer.accelerator.num_processes > 1:
        return "gradients are reduced over several processes"
    return STEPPED if _stepped(trainer.model) else None


def _stepped(module: nn.Module) -> bool:
    """Whether hooks on parameters run inside the backward, where some optimizers step."""
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())


def _is_deepspeed(trainer: Any) -> bool:
    """Whether DeepSpeed's engine trains, partitions or none. It steps inside a window's last backward."""
    return bool(getattr(trainer, "is_deepspeed_enabled", False)) or _zero_stage(trainer, trainer.model) > 0


def _zero_stage(trainer: Any, wrapped: Any) -> int:
    """DeepSpeed's ZeRO stage, 0 without one."""
    stage = getattr(wrapped, "zero_optimization_stage", None)
    if callable(stage):
        return int(stage())
    if any(hasattr(p, "ds_id") for p in trainer.model.parameters()):
        return 3
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return int(plugin.zero_stage) if plugin is not None else 0


def _fsdp_version(trainer: Any, wrapped: Any) -> int:
    """The version of FSDP, 0 without it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        modules = list(wrapped.modules())
        if any(isinstance(m, fsdp.FSDPModule) for m in modules):
            return 2
        if any(isinstance(m, fsdp.FullyShardedDataParallel) for m in modules):
            return 1
    if any(_is_dtensor(p) for p in wrapped.parameters()):
        return 2
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return int(getattr(plugin, "fsdp_version", 1) or 1) if plugin is not None else 0


def _is_dtensor(value: Any) -> bool:
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(value, dtensor.DTensor)


def is_split(parameter: Tensor) -> bool:
    """Whether this process holds only a part of a parameter at the moment."""
    if _is_dtensor(parameter):
        return any(not place.is_replicate() for place in parameter.placements)  # type: ignore[attr-defined]
    return hasattr(parameter, "ds_status") and parameter.ds_status.name != "AVAILABLE"


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a parameter over all processes; FSDP version 1 keeps none, there it is that of the part at hand."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class ShardedHead:
    """The output head of a model in several shards: gathered once a step, whole in its place where it is measured.

    DeepSpeed of any stage steps the optimizer inside the last backward of a window, before the head is measured; so
    there the head is kept, too: its weights afterwards are not those that made the captured gradient.

    ``gather`` runs collectives, so every rank must call it at the same place, after they have agreed that all can
    (``reserve`` is what can fail on one rank alone). Between ``gather`` and ``release`` everything else is local.
    """

    def __init__(self, trainer: Any, inner: Any) -> None:
        self.trainer, self.inner = trainer, inner
        self._whole: nn.Module | None = None
        self._step = -1
        self._inside = False

    def reserve(self) -> None:
        """Have the memory that ``gather`` needs once, so that running out of it shows here; no collective.

        torch's allocator keeps what this sets free. Raises torch.OutOfMemoryError.
        """
        if not self._gathers() or self._current():
            return
        sizes = [math.prod(whole_shape(p)) * self._dtype(p).itemsize for p in self._parameters().values()]
        torch.empty(2 * sum(sizes), dtype=torch.uint8, device=self.trainer.accelerator.device)

    def gather(self) -> None:
        """Gather the head's parameters, once a step: a second call before the optimizer has stepped does nothing.

        Nothing but collectives can fail in it on one rank alone, short of memory that ``reserve`` did not find.
        """
        if not self._gathers() or self._current():
            return
        self.release()
        parameters = self._parameters()
        values = dict(zip(parameters, self._values(parameters), strict=True))
        self._whole = plain_copy(self.inner.get_output_embeddings(), values)
        self._step = int(self.trainer.state.global_step)

    def release(self) -> None:
        """Let go of what ``gather`` holds."""
        self._whole, self._step = None, -1

    def missing(self) -> str | None:
        """Why the head cannot be measured in this process now, or ``None``."""
        head = self.inner.get_output_embeddings()
        if self._current() or head is None:
            return None
        kind = sharding(self.trainer)
        if kind == "fsdp1":
            return "FSDP version 1 keeps the output head in a flat shard; set fsdp_version: 2 to have it measured"
        if kind in ("fsdp2", "zero3"):
            return f"the output head is sharded ({kind}) and was not gathered for this step"
        if _is_deepspeed(self.trainer):
            return (
                "DeepSpeed steps the optimizer inside the backward, and the head before it was not kept for this step"
            )
        return f"{STEPPED}, before the output head can be measured" if _stepped(head) else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has its whole head, without hooks that gather. The very same head module afterwards."""
        if self._inside or not self._current():
            yield
            return
        assert self._whole is not None
        self._inside = True
        try:
            with _head_replaced(self.inner, self._whole):
                yield
        finally:
            self._inside = False

    def _current(self) -> bool:
        """Whether the whole head is that of the weights as they are now."""
        return self._whole is not None and self._step == int(self.trainer.state.global_step)

    def _gathers(self) -> bool:
        kind = sharding(self.trainer)
        wanted = kind in ("fsdp2", "zero3") or _is_deepspeed(self.trainer)
        return wanted and self.inner.get_output_embeddings() is not None

    def _parameters(self) -> dict[int, nn.Parameter]:
        """The head's own parameters by identity, those of adapters on it too; tied ones once."""
        return {id(p): p for p in self.inner.get_output_embeddings().parameters()}

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype that the live forward has a parameter in."""
        plugin = getattr(self.trainer.accelerator.state, "fsdp_plugin", None)
        low = getattr(getattr(plugin, "mixed_precision_policy", None), "param_dtype", None)
        return low if isinstance(low, torch.dtype) and parameter.is_floating_point() else parameter.dtype

    @torch.no_grad()
    def _values(self, parameters: Mapping[int, nn.Parameter]) -> list[nn.Parameter]:
        """Plain whole parameters with the values of the given ones."""
        device = self.trainer.accelerator.device
        apart = [p for p in parameters.values() if hasattr(p, "ds_status") and is_split(p)]
        out = []
        with _gathered_by_deepspeed(apart):
            for p in parameters.values():
                value = p.detach()
                if _is_dtensor(value):
                    value = value.to(device=device, dtype=self._dtype(p)).full_tensor()  # type: ignore[attr-defined]
                else:
                    value = value.to(device=device, copy=True)
                made = nn.Parameter(value, requires_grad=p.requires_grad)
                if hasattr(p, "ds_status"):  # TRL asks it of every head
                    made.ds_status = type(p.ds_status).AVAILABLE  # type: ignore[attr-defined]
                out.append(made)
        return out


@contextmanager
def _head_replaced(inner: Any, other: nn.Module) -> Iterator[None]:
    """Another output head in every place where the model keeps its own; its own again afterwards."""
    head = inner.get_output_embeddings()
    places = [(m, name) for m in inner.modules() for name, child in m._modules.items() if child is head]
    try:
        for parent, name in places:
            parent._modules[name] = other
        yield
    finally:
        for parent, name in places:
            parent._modules[name] = head


def head_alone(inner: Any) -> AbstractContextManager[None]:
    """Inside a live forward: the head can be run by itself, without the hooks that FSDP counts its passes by.

    A head in a unit of its own is gathered for it, so every rank must come here.
    """
    head = inner.get_output_embeddings()
    hooked = any(_gathers(hook) for m in head.modules() for table in _HOOKS for hook in getattr(m, table).values())
    if not hooked:
        return nullcontext()
    return _head_replaced(inner, plain_copy(head, {id(p): _whole_now(p) for p in head.parameters()}))


@torch.no_grad()
def _whole_now(parameter: nn.Parameter) -> nn.Parameter:
    if not _is_dtensor(parameter):
        return parameter
    return nn.Parameter(parameter.full_tensor(), parameter.requires_grad)  # type: ignore[attr-defined]


def trained_whole(parameter: Tensor) -> Tensor:
    """A parameter as a plain tensor to compute a loss with, differentiable.

    The gradient of one that FSDP2 holds in shards is averaged over its ranks, as FSDP averages the others. (Left to
    itself, ``full_tensor()`` takes the gradient for equal on all ranks and keeps each rank's own.)
    """
    if not _is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    whole: Tensor = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # type: ignore[attr-defined]
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / mesh.size())
    return whole


def _gathered_by_deepspeed(parameters: list[nn.Parameter]) -> Any:
    """DeepSpeed's own context for reading partitioned parameters whole; all of them in one collective."""
    if not parameters:
        return nullcontext()
    return importlib.import_module("deepspeed").zero.GatheredParameters(parameters)


def plain_copy(module: nn.Module, values: Mapping[int, nn.Parameter] | None = None) -> nn.Module:
    """A module that computes what this one does, without the hooks of FSDP and DeepSpeed.

    values: parameters to have instead, by the identity of the module's own. Everything else is shared with the
    original: buffers, configuration, other hooks.
    """
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    own = module._parameters.items()
    changed = {name: p if p is None or values is None else values[id(p)] for name, p in own}
    children = {name: m if m is None else plain_copy(m, values) for name, m in module._modules.items()}
    twin.__dict__.update(_parameters=changed, _modules=children, _buffers=dict(module._buffers))
    for table in _HOOKS:
        kept = OrderedDict((k, hook) for k, hook in getattr(module, table).items() if not _gathers(hook))
        twin.__dict__[table] = kept
    return twin


def _gathers(hook: Any) -> bool:
    """Whether a hook belongs to a library that shards parameters."""
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", "")).startswith(_LIBRARIES)
