"""Deep steps: full-parameter gradients of the live path, of its counterpart, and of what the trainer accumulated.

One process, gradients of both paths within ``exact_gradient_bytes``: they are kept, and compared exactly. Otherwise
they are sketched parameter by parameter. With several processes every rank sketches its own gradient, and the caller
adds up what ``local`` gives:

    parts = deep.local(last, micro_batches)
    packed = parts.packed if parts is not None else torch.zeros(deep.packed_size, dtype=torch.float64)
    deep.fill(last, all_reduced(packed), processes)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftscope.config import DriftscopeConfig
from driftscope.hooks import adapters
from driftscope.hooks.capture import MicroBatch
from driftscope.hooks.compare import Comparison, Paths
from driftscope.hooks.gradient_record import fill_gradient
from driftscope.hooks.gradients import Found, PathGradient, Window, exact_found, pack, take_accumulated, unpack
from driftscope.hooks.gradients import packed_size as size_of_pack
from driftscope.hooks.guard import Guard
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, backbone_name, causal_lm
from driftscope.hooks.param_norm import PullBack, add_micro_batch
from driftscope.hooks.sharding import sharding, split_gradients
from driftscope.records import StepRecord
from driftscope.sketch import BiasTracker, ExactGradient, GradientSketch, SketchLayout
from driftscope.spectrum import Head


@dataclass(frozen=True)
class GradientParts:
    """One rank's part. ``packed``: float64 on the host, the same length on every rank and at every window."""

    packed: Tensor


class DeepWindow:
    """Gradients summed over the micro-batches of one accumulation window; the bias over the deep steps so far."""

    def __init__(self, trainer: Any, guard: Guard, rows: Callable[[], int], config: DriftscopeConfig) -> None:
        self.trainer, self.guard, self.rows, self.config = trainer, guard, rows, config
        self.windows = Window()
        self.bias: BiasTracker | None = None
        self._layout: SketchLayout | None = None

    def refusal(self) -> str | None:
        """Why gradients of this trainer cannot be had by rerunning a rank's own trunk, or ``None``."""
        if sharding(self.trainer) not in ("none", "ddp") or getattr(self.trainer, "is_deepspeed_enabled", False):
            return split_gradients(self.trainer)
        hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.parameters().values())
        return "an optimizer steps inside the backward" if hooked else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {name: p for name, p in self.trainer.model.named_parameters() if p.requires_grad}

    @property
    def layout(self) -> SketchLayout:
        """Rows and hash of the sketches. A bias begins anew where the trainable parameters have changed."""
        numels = {name: p.numel() for name, p in self.parameters().items()}
        if self._layout is None or list(self._layout.row_of) != list(numels):
            self._layout = SketchLayout.of(numels, self.config.sketch_size)
            self.bias = None
        return self._layout

    @property
    def packed_size(self) -> int:
        """Length of ``GradientParts.packed``."""
        return size_of_pack(self.layout)

    def exact(self) -> bool:
        """Whether both gradients, in float32, are kept: one process, and within ``exact_gradient_bytes``."""
        if self.trainer.accelerator.num_processes > 1:
            return False
        sizes = [p.numel() * max(4, p.element_size()) for p in self.parameters().values()]
        return 2 * sum(sizes) <= self.config.exact_gradient_bytes

    def add(
        self,
        batch: MicroBatch,
        passed: Any,
        paths: Paths,
        comparison: Comparison,
        heads: dict[str, Head],
        temperature: float,
        record: StepRecord,
    ) -> None:
        """Add one micro-batch of the live path and of the other side of its gap."""
        why = self.refusal()
        if why is not None:
            record.unavailable["param_norm"] = f"full-parameter gradients are not read: {why}"
            return
        assert batch.inputs is not None
        window = self.windows
        if window.live is None:
            window.live = paths.live
            sides = [record.gap.candidate, record.gap.reference] if record.gap is not None else []
            window.other = next((s for s in sides if s != paths.live and s in comparison.coefs), None)
        targets_BT, rows_BT = batch.inputs["completion_ids"], passed.scene.rows_BT
        for name in (window.live, window.other):
            if name is None or name not in comparison.coefs:
                continue
            path = comparison.coefs[name]
            head = heads[path.head if path.head in (MODEL_HEAD, RAW_HEAD) else MODEL_HEAD]
            bonus = _grid(path.e_N, rows_BT) if path.e_N is not None else None
            live = passed.grad_BTD if name == paths.live else None
            self._pull(name, batch, PullBack(head, _grid(path.c_N, rows_BT), bonus, targets_BT, temperature, live))

    def _pull(self, name: str, batch: MicroBatch, path: PullBack) -> None:
        trainer, layout, parameters = self.trainer, self.layout, self.parameters()
        if name not in self.windows.paths:
            self.windows.paths[name] = PathGradient((ExactGradient if self.exact() else GradientSketch)(layout))
        gradient, scale = self.windows.paths[name], adapters.loss_scale(trainer)
        names = {p: n for n, p in parameters.items()}

        def sink(parameter: nn.Parameter, grad: Tensor) -> None:
            gradient.held.add(names[parameter], grad, scale=1.0 / scale)

        inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        add_micro_batch(
            sink,
            inner._modules[backbone_name(inner)],
            list(parameters.values()),
            batch.calls,
            path,
            rows=self.rows(),
            autocast=lambda: adapters.autocast(trainer),
            device=trainer.accelerator.device,
            scale=scale,
        )
        gradient.micro_batches += 1

    def clipping(self) -> None:
        """The trainer is about to clip: look at what it has accumulated, if this is a deep step."""
        window = self.windows
        if window.live is None or window.live not in window.paths:
            return
        scale = 1.0 / adapters.loss_scale(self.trainer)
        window.accumulated = take_accumulated(window, self.layout, self.parameters(), scale)

    def local(self, last: StepRecord | None, micro_batches: int) -> GradientParts | None:
        """This rank's part of the window, ``None`` where it was no deep step here; lets go of the gradients."""
        window, self.windows = self.windows, Window()
        if last is None or window.live is None:
            return None
        return GradientParts(pack(window, self.layout, micro_batches))

    def fill(self, record: StepRecord, packed: Tensor, processes: int) -> None:
        """Put the window's gradients on its last record. packed: the sum of the ranks' parts, zeros for none."""
        self._put(record, unpack(packed.cpu(), self.layout, record.live, processes))

    def close(self, last: StepRecord | None, micro_batches: int) -> None:
        """One process: put the window's gradients on its last record, and let go of them."""
        processes = self.trainer.accelerator.num_processes
        if last is None or self.windows.live is None:
            self.windows.clear()
        elif processes > 1:
            self.windows.clear()
            last.unavailable["param_norm"] = "the gradients of several processes were not added up"
        elif isinstance(next(iter(self.windows.paths.values())).held, ExactGradient):
            window, self.windows = self.windows, Window()
            self._put(last, exact_found(window, self.layout, micro_batches))
        else:
            parts = self.local(last, micro_batches)
            assert parts is not None
            self.fill(last, parts.packed, 1)

    def _put(self, record: StepRecord, found: Found) -> None:
        if found.why is not None:
            record.unavailable["param_norm"] = found.why
            return
        if self.bias is None:
            self.bias = BiasTracker(self.layout)
        seen = found.accumulated
        if found.nonfinite:
            self.bias.skipped += 1
        elif found.difference is not None and seen is not None:
            square = float(seen.bb.sum())
            along_R = (seen.ab - seen.bb) / square if square > 0 else torch.zeros_like(seen.ab)
            self.bias.add(found.difference, square**0.5, along_R)
        fill_gradient(record, found, self.bias.read() if found.difference is not None else None)


def _grid(values_N: Tensor, rows_BT: Tensor) -> Tensor:
    out = torch.zeros(rows_BT.shape, dtype=values_N.dtype, device=values_N.device)
    out[rows_BT] = values_N
    return out
