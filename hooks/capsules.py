"""Replay capsules: the worst micro-batch of a window is kept at hand, and saved on a critical alarm or on demand.

Until it is saved a batch is held by reference: its tensors are detached already, and they are let go when the next
window begins. Hidden states larger than the budget are held on evenly spaced rows. The head's weight moves with the
optimizer's step, so it is copied to the host where a batch is critical as it stands.
Shapes: B sequences, T completion tokens, N rows of the head pass, n rows held, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.capsule.format import Capsule, write_capsule
from driftscope.config import DriftscopeConfig
from driftscope.errors import CapsuleError, UsageError
from driftscope.hooks import adapters
from driftscope.hooks.compare import Paths
from driftscope.hooks.head import MODEL_HEAD
from driftscope.hooks.headpass import HeadPass, Heads
from driftscope.hooks.shadow import LigerPath
from driftscope.records import SEVERITIES, AlertRecord, RunInfo, StepRecord
from driftscope.rules import Thresholds, evaluate
from driftscope.spec import LossSpec

FOLDER = "capsules"
CHECKED_ROWS = 16
INPUTS = {
    "completion_ids": "completion_ids",
    "completion_mask": "completion_mask",
    "tool_mask": "tool_mask",
    "advantages": "advantages",
    "old_logps": "old_per_token_logps",
    "ref_logps": "ref_per_token_logps",
    "sampling_logps": "sampling_per_token_logps",
    "is_ratio": "importance_sampling_ratio",
}


@dataclass
class _Held:
    """One micro-batch, by reference. ``hidden``: rows (n,), hidden states and hidden gradient (n, D)."""

    record: StepRecord
    spec: LossSpec
    badness: tuple[int, float]
    tensors: dict[str, Tensor]
    measured: dict[str, Any]
    rows_BT: Tensor
    hidden: Callable[[], tuple[Tensor, Tensor, Tensor]] | None
    notes: list[str] = field(default_factory=list)


class Capsules:
    """Keeps the worst micro-batch of the window, and saves it."""

    def __init__(self, trainer: Any, config: DriftscopeConfig, heads: Heads) -> None:
        self.trainer, self.config, self.heads = trainer, config, heads
        self.on = config.capsules > 0 and bool(trainer.accelerator.is_main_process)
        self.limits = Thresholds(gap_warning=config.gap_warning, gap_critical=config.gap_critical)
        self.saved: list[Path] = []
        self._told: set[str] = set()  # critical rules that a capsule has been saved for
        self._waiting: list[AlertRecord] = []  # critical alarms of steps that had no batch to save
        self._held: _Held | None = None
        self._weight: Tensor | None = None  # lm_head.weight as it was in this window, on the host

    def begin(self) -> None:
        """A new window starts: let go of the large tensors of the last one."""
        self._weight = None
        if self._held is not None and self._held.hidden is not None:
            self._held.hidden = None
            self._held.notes.append("saved after its window: hidden states were let go")

    def offer(
        self,
        inputs: adapters.Inputs,
        spec: LossSpec,
        passed: HeadPass,
        paths: Paths,
        liger: LigerPath | None,
        record: StepRecord,
    ) -> None:
        """Keep this micro-batch where it is the worst of its window so far."""
        if not self.on:
            return
        alerts = evaluate(record, self.limits, on_error=lambda code, error: None)
        bad = _badness(record, alerts)
        held = self._held
        if held is not None and held.record.step == record.step and bad <= held.badness:
            return
        measured = self._measured(inputs, passed, paths)
        if liger is not None and paths.liger is not None:
            measured["liger_call"] = _call_of(liger, inputs)
        tensors = _tensors(inputs, passed, paths)
        self._held = _Held(record, spec, bad, tensors, measured, passed.scene.rows_BT, None)
        self._hold_hidden(self._held, passed)
        if self._new(alerts) and len(self.saved) < self.config.capsules:
            self._copy_weight()

    def after_window(self, step: int, alerts: list[AlertRecord], info: RunInfo | None) -> Path | None:
        """Save the held batch where there is a critical alarm that no capsule of this run is about yet.

        An alarm of a step without a head pass waits for the next step that has one.
        """
        alerts = [*self._waiting, *alerts]
        new = self._new(alerts)
        if not self.on or not new or len(self.saved) >= self.config.capsules:
            return None
        if self._held is None or self._held.record.step != step:
            self._waiting = [a for a in alerts if a.rule in new]
            return None
        self._waiting = []
        path = self._save(alerts, info, f"alarm {', '.join(sorted(new))}", None)
        self._told |= new
        self.saved.append(path)
        return path

    def on_demand(self, info: RunInfo | None, directory: Path | None, *, texts: bool) -> Path:
        """Save the last batch that was analysed. Raises ``UsageError`` where none is held."""
        if not self.on:
            raise UsageError(
                "save_capsule() has no batch: capsules are kept by rank 0 only, and not with capsules=0. "
                "Attach with capsules=1 or more."
            )
        if self._held is None:
            raise UsageError(
                "save_capsule() has no batch: none was analysed with its head yet. Call it after a step that "
                "spectrum_every selects, or set spectrum_every=1."
            )
        return self._save([], info, "on demand", directory, texts=texts)

    def _new(self, alerts: list[AlertRecord]) -> set[str]:
        return {a.rule for a in alerts if a.severity == "critical"} - self._told

    # -- holding ------------------------------------------------------------------------------------------------

    def _measured(self, inputs: adapters.Inputs, passed: HeadPass, paths: Paths) -> dict[str, Any]:
        t, items = self.trainer, inputs.get("num_items_in_batch")
        made = {"reference": paths.reference, "liger": paths.liger}
        return {
            "live": paths.live,
            "dtype": _name(passed.dtype),
            "autocast": self._autocast(passed.hidden_BTD.device),
            "heads": {name: self.heads.views[name].fused is not None for name in passed.scene.spectrum.views},
            "transform": self.heads.transform.as_dict(),
            "sampling": {"top_p": float(t.top_p), "top_k": int(t.top_k or 0), "min_p": float(t.min_p or 0.0)},
            "num_items_in_batch": float(items) if items is not None else None,
            "rank_mean_tokens": passed.scene.batches[MODEL_HEAD].rank_mean_tokens,
            "scatter": self.config.scatter_points,
            "losses": {name: path.loss for name, path in made.items() if path is not None},
            "liger_call": None,
        }

    def _autocast(self, device: torch.device) -> str | None:
        with adapters.autocast(self.trainer):
            on = torch.is_autocast_enabled(device.type)
            return _name(torch.get_autocast_dtype(device.type)) if on else None

    def _hold_hidden(self, held: _Held, passed: HeadPass) -> None:
        """Hidden states and gradient: all of them by reference, or the rows that the budget allows."""
        hidden_BTD, grad_BTD, rows_BT = passed.hidden_BTD, passed.grad_BTD, held.rows_BT
        size = int(rows_BT.sum())
        whole = hidden_BTD.untyped_storage().nbytes() + grad_BTD.untyped_storage().nbytes()
        if whole <= self.config.capsule_bytes:
            everything = torch.arange(size, device=rows_BT.device)
            held.hidden = lambda: (everything, hidden_BTD[rows_BT], grad_BTD[rows_BT])
            return
        row = hidden_BTD.shape[-1] * (hidden_BTD.element_size() + grad_BTD.element_size())
        index = _spread(size, self.config.capsule_bytes // row).to(rows_BT.device)
        held.notes.append(f"hidden states on {index.numel()} of {size} rows: capsule_bytes allows no more")
        if index.numel():
            at = rows_BT.nonzero()[index]
            some = (index, hidden_BTD[at[:, 0], at[:, 1]], grad_BTD[at[:, 0], at[:, 1]])
            held.hidden = lambda: some

    def _head(self) -> Any:
        return self.heads.inner.get_output_embeddings()

    def _copy_weight(self) -> None:
        """Copy lm_head's weight to the host while it is that of the batch, once a window."""
        weight = self._head().weight
        if self._weight is None and _bytes(weight) <= self.config.capsule_bytes // 2:
            self._weight = weight.detach().to("cpu", copy=True)

    # -- saving -------------------------------------------------------------------------------------------------

    def _save(
        self, alerts: list[AlertRecord], info: RunInfo | None, why: str, directory: Path | None, *, texts: bool = False
    ) -> Path:
        held = self._held
        assert held is not None
        tensors, notes = {k: v.detach().cpu() for k, v in held.tensors.items()}, list(held.notes)
        self._add_hidden(held, tensors, notes)
        if info is not None:
            info = info.model_copy(update={"settings": {k: v for k, v in info.settings.items() if k != "run_dir"}})
        capsule = Capsule(
            record=held.record.model_copy(deep=True),
            spec=held.spec,
            info=info,
            tensors=tensors,
            measured=held.measured,
            findings=evaluate(held.record, self.limits, on_error=lambda code, error: None),
            alarm=alerts,
            why=why,
            notes=notes,
            texts=self._texts(tensors) if texts else None,
        )
        return write_capsule(directory or self._free_name(held.record.step), capsule)

    def _add_hidden(self, held: _Held, tensors: dict[str, Tensor], notes: list[str]) -> None:
        """Hidden states, hidden gradient and the head's weight, as far as the budget goes."""
        if held.hidden is None:
            return
        index, hidden, grad = (part.cpu() for part in held.hidden())
        weight, why = self._weight_of(held, hidden, index)
        if weight is None:
            notes.append(f"lm_head is not saved: {why}")
        else:
            tensors |= weight
        room = self.config.capsule_bytes - sum(_bytes(v) for v in (weight or {}).values())
        row = hidden.shape[-1] * (hidden.element_size() + grad.element_size())
        chosen = _spread(index.numel(), room // row)
        if chosen.numel() < index.numel():
            notes.append(f"hidden states on {chosen.numel()} rows: capsule_bytes allows no more beside lm_head")
        if chosen.numel():
            tensors |= {"hidden_rows": index[chosen], "hidden": hidden[chosen], "hidden_grad": grad[chosen].float()}

    def _weight_of(self, held: _Held, hidden: Tensor, index: Tensor) -> tuple[dict[str, Tensor] | None, str]:
        """lm_head's weight and bias as they were in the batch, or ``None`` and why not.

        Whether they are is tried: their log-probs must be those of the head pass.
        """
        head = self._head()
        weight, bias = head.weight, getattr(head, "bias", None)
        if weight.dim() != 2 or weight.shape[-1] != hidden.shape[-1]:
            return None, "this process does not hold it whole"
        if _bytes(weight) > self.config.capsule_bytes // 2:
            return None, f"it takes {_bytes(weight) / 2**20:.0f} MiB, over half of capsule_bytes"
        weight = weight if self._weight is None else self._weight
        found = {"head.weight": weight.detach().cpu()}
        if bias is not None:
            found["head.bias"] = bias.detach().cpu()
        if not self._agrees(held, found, hidden[:CHECKED_ROWS], index[:CHECKED_ROWS]):
            return None, "the optimizer has moved it since"
        return found, ""

    @torch.no_grad()
    def _agrees(self, held: _Held, found: dict[str, Tensor], hidden: Tensor, index: Tensor) -> bool:
        transform = self.heads.transform
        name = "raw" if "view.raw.logps" in held.tensors else MODEL_HEAD
        if name == MODEL_HEAD and not transform.joined:
            return True
        bias = found.get("head.bias")
        logits = nn.functional.linear(
            hidden.float(), found["head.weight"].float(), None if bias is None else bias.float()
        )
        targets = held.tensors["completion_ids"].cpu()[held.rows_BT.cpu()][index]
        wanted = held.tensors[f"view.{name}.logps"].cpu()[index].double()
        log_p = (logits.double() / float(held.spec.temperature)).log_softmax(-1)
        error = float((log_p.gather(-1, targets[:, None])[:, 0] - wanted).abs().max())
        eps = torch.finfo(getattr(torch, held.measured["dtype"])).eps
        return error <= 16 * eps * (1.0 + float(logits.abs().max()))

    def _texts(self, tensors: dict[str, Tensor]) -> list[str]:
        tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
        pairs = zip(tensors["completion_ids"], tensors["completion_mask"].bool(), strict=True)
        return [tokenizer.decode(ids[keep].tolist()) for ids, keep in pairs]

    def _free_name(self, step: int) -> Path:
        folder = Path(self.config.run_dir) / FOLDER
        name = folder / f"step-{step:06d}"
        for count in range(2, 1000):
            if not name.exists():
                return name
            name = folder / f"step-{step:06d}-{count}"
        raise CapsuleError(f"{folder} holds a thousand capsules of step {step}. Choose another run_dir.")


def _badness(record: StepRecord, alerts: list[AlertRecord]) -> tuple[int, float]:
    """Severity of the worst finding, then the distance of gap and ratio from 1 in logs."""
    worst = max((SEVERITIES.index(a.severity) + 1 for a in alerts), default=0)
    raw = record.is_ratio.raw.mean if record.is_ratio is not None and record.is_ratio.raw is not None else None
    gap = record.gap.grad_norm_ratio if record.gap is not None else None
    return worst, sum(abs(math.log(v)) for v in (gap, raw) if v is not None and 0 < v < math.inf)


def _tensors(inputs: adapters.Inputs, passed: HeadPass, paths: Paths) -> dict[str, Tensor]:
    """Everything but hidden states and weight, by reference."""
    found = {name: inputs.get(given) for name, given in INPUTS.items()}
    spectrum = passed.scene.spectrum
    found |= {"rows": passed.scene.rows_BT, "gg": spectrum.gg_N, "kept_mass": spectrum.kept_mass_N}
    for head, view in spectrum.views.items():
        found |= {f"view.{head}.{name.removesuffix('_N')}": value for name, value in vars(view).items()}
    found |= {f"cross.{a}.{b}": value for (a, b), value in spectrum.cross_N.items()}
    for name, path in (("reference", paths.reference), ("liger", paths.liger)):
        if path is not None:
            found[f"{name}.c"] = path.logps_BT
            found[f"{name}.e"] = path.entropies_BT if name == "reference" else None
    return {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}


class _Listener(nn.Module):
    """Stands where a Liger loss module stands, takes note of its arguments and answers 1."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_signature"] = inspect.signature(type(module).forward)
        self.__dict__["call"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        bound = self.__dict__["_signature"].bind(self, *args, **kwargs)
        self.__dict__["call"] = {k: v for k, v in bound.arguments.items() if k != "self"}
        return torch.ones(()), [torch.zeros(())] * 2


def _call_of(path: LigerPath, inputs: adapters.Inputs) -> dict[str, Any]:
    """How the trainer calls Liger's loss, as data: settings, arguments by name, and the factor on the result."""
    if not type(path.module).__module__.startswith("liger_kernel."):
        return {"why": f"the loss module is {type(path.module).__module__}'s own copy"}
    listener = _Listener(path.module)
    ids = inputs["completion_ids"]
    factor = path._call(listener, inputs, torch.zeros((*ids.shape, 1), device=ids.device))
    arguments: dict[str, Any] = {}
    for name, value in listener.__dict__["call"].items():
        if name in ("_input", "lin_weight", "bias", "ref_input", "ref_weight", "ref_bias"):
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            known = _known(value, inputs)
            if known is None:
                return {"why": f"its argument {name} is no tensor of the batch"}
            arguments[name] = {"tensor": known}
        else:
            arguments[name] = value.item() if isinstance(value, Tensor) else value
    known_settings = inspect.signature(type(path.module).__init__).parameters
    settings = {k: v for k, v in vars(path.module).items() if k in known_settings and _plain(v)}
    return {"settings": settings, "arguments": arguments, "factor": float(factor), "why": None}


def _known(value: Tensor, inputs: adapters.Inputs) -> str | None:
    """Name under which the capsule holds this tensor."""
    mask = adapters.policy_mask(inputs)
    for name, given in INPUTS.items():
        if inputs.get(given) is value:
            return name
    for name, given in INPUTS.items():
        other = inputs.get(given)
        if isinstance(other, Tensor) and other.shape == value.shape and bool((other == value).all()):
            return name
    return "completion_mask * tool_mask" if mask.shape == value.shape and bool((mask == value).all()) else None


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _spread(size: int, room: int) -> Tensor:
    """At most ``room`` of ``size`` indices, evenly spaced."""
    if room >= size:
        return torch.arange(size)
    return torch.arange(max(room, 0)) * size // max(room, 1)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
