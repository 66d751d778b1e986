"""Deep steps: the full-parameter gradient norm of the live path and of its counterpart over one window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from driftscope.hooks import adapters
from driftscope.hooks.capture import MicroBatch
from driftscope.hooks.compare import Comparison, Paths
from driftscope.hooks.guard import Guard
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, backbone_name, causal_lm
from driftscope.hooks.param_norm import PullBack, WindowGradient, add_micro_batch
from driftscope.records import StepRecord
from driftscope.spectrum import Head


class DeepWindow:
    """Gradients of two paths, summed over the micro-batches of one accumulation window."""

    def __init__(self, trainer: Any, guard: Guard, rows: Callable[[], int]) -> None:
        self.trainer, self.guard, self.rows = trainer, guard, rows
        self.windows: dict[str, WindowGradient] = {}

    def add(
        self,
        batch: MicroBatch,
        passed: Any,
        paths: Paths,
        comparison: Comparison,
        heads: dict[str, Head],
        temperature: float,
    ) -> None:
        """Add one micro-batch of the live path and of its counterpart."""
        assert batch.inputs is not None
        targets_BT, rows_BT = batch.inputs["completion_ids"], passed.scene.rows_BT
        for name, path in comparison.coefs.items():
            if name == "oracle":
                continue
            head = heads[path.head if path.head in (MODEL_HEAD, RAW_HEAD) else MODEL_HEAD]
            self._pull(
                name,
                batch,
                PullBack(
                    head,
                    _grid(path.c_N, rows_BT),
                    _grid(path.e_N, rows_BT) if path.e_N is not None else None,
                    targets_BT,
                    temperature,
                    passed.grad_BTD if name == paths.live else None,
                ),
            )

    def _pull(self, name: str, batch: MicroBatch, path: PullBack) -> None:
        trainer = self.trainer
        inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        add_micro_batch(
            self.windows.setdefault(name, WindowGradient()),
            inner._modules[backbone_name(inner)],
            [p for p in trainer.model.parameters() if p.requires_grad],
            batch.calls,
            path,
            rows=self.rows(),
            autocast=lambda: adapters.autocast(trainer),
            device=trainer.accelerator.device,
        )

    def close(self, last: StepRecord | None, micro_batches: int) -> None:
        """Put the window's norms on its last record, and let go of the gradients."""
        windows, self.windows = self.windows, {}
        if last is None or not windows:
            return
        for name, window in windows.items():
            if name in last.paths and window.micro_batches == micro_batches:
                last.paths[name].param_grad_norm = window.norm()
        if last.gap is not None:
            a, b = last.paths.get(last.gap.candidate), last.paths.get(last.gap.reference)
            if a is not None and b is not None and a.param_grad_norm is not None and b.param_grad_norm:
                last.gap.param_grad_norm_ratio = a.param_grad_norm / b.param_grad_norm


def _grid(values_N: Tensor, rows_BT: Tensor) -> Tensor:
    out = torch.zeros(rows_BT.shape, dtype=values_N.dtype, device=values_N.device)
    out[rows_BT] = values_N
    return out
