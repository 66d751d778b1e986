"""What each path's head and loss cost, and the corrected path's real call, on the captured hidden states.

Deep steps only: time and peak memory of head, loss and their backward, for the paths that a user can choose between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from driftscope.hooks import adapters
from driftscope.hooks.correct import FusedHead
from driftscope.hooks.head import backbone_answers
from driftscope.hooks.shadow import LigerPath, trl_loss
from driftscope.records import PathCost
from driftscope.spectrum import Logits

MOST_CPU_BYTES = 2 * 2**30
Call = Callable[[], tuple[float, Tensor]]


class PathCalls:
    """The real calls of the paths on one micro-batch: each gives its loss and hidden gradient (B, T, D)."""

    def __init__(self, trainer: Any, inner: Any, inputs: adapters.Inputs, hidden_BTD: Tensor, bonus: float) -> None:
        self.trainer, self.inner, self.inputs = trainer, inner, inputs
        self.hidden_BTD, self.bonus = hidden_BTD, bonus
        self.head_parameters = [p for p in inner.get_output_embeddings().parameters() if p.requires_grad]

    def corrected(self, fused: FusedHead) -> tuple[float, Tensor]:
        """The fused linear head under TRL's own algebra."""

        def score(leaf: Tensor) -> tuple[Tensor, Tensor]:
            mask, targets = self.inputs["completion_mask"], self.inputs["completion_ids"]
            logps, entropies = fused.score(self.inner, leaf, targets, mask, entropy=True)
            assert entropies is not None
            return logps, entropies

        return self._differentiate(score)

    def full_logits(self, head: Logits) -> tuple[float, Tensor]:
        """The model's own logits, all of them at once, under TRL's own algebra."""

        def score(leaf: Tensor) -> tuple[Tensor, Tensor]:
            flat = head(leaf.reshape(-1, leaf.shape[-1])).float() / self.trainer.temperature
            log_p = torch.log_softmax(flat, -1).view(*leaf.shape[:2], -1)
            with torch.no_grad():
                entropies = -(log_p.exp() * log_p).sum(-1)
            return log_p.gather(-1, self.inputs["completion_ids"][..., None]).squeeze(-1), entropies

        return self._differentiate(score)

    def trl_fused_head(self) -> tuple[float, Tensor]:
        """TRL's own fused head (1.14 on) under its algebra."""

        def score(leaf: Tensor) -> tuple[Tensor, Tensor]:
            ids = self.inputs["completion_ids"]
            labels = torch.cat([ids[:, :1], ids], 1).masked_fill(
                torch.cat([ids.new_ones(ids.shape[0], 1), self.inputs["completion_mask"]], 1) == 0, -100
            )
            hidden = torch.cat([leaf, leaf[:, -1:]], 1)  # the last position predicts nothing
            with backbone_answers(self.inner, hidden), adapters.autocast(self.trainer):
                out = self.inner.forward(input_ids=labels.clamp(min=0), labels=labels, fused_lm_head=True)
            return out.log_probs, out.entropy

        return self._differentiate(score)

    def _differentiate(self, score: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[float, Tensor]:
        with torch.enable_grad():
            leaf = self.hidden_BTD.detach().clone().requires_grad_(True)
            logps, entropies = score(leaf)
            loss = trl_loss(self.trainer, self.inputs, logps, entropies, bonus=self.bonus)
        grads = torch.autograd.grad(loss, [leaf, *self.head_parameters], allow_unused=True)
        assert grads[0] is not None
        return float(loss.detach()), grads[0]


def measure_costs(calls: PathCalls, fused: FusedHead, head: Logits, liger: LigerPath | None) -> dict[str, PathCost]:
    """Time and peak memory of each path's call, after a first one to warm up."""
    inputs, hidden = calls.inputs, calls.hidden_BTD
    device = hidden.device
    wanted: dict[str, Call] = {"corrected": lambda: calls.corrected(fused)}
    if liger is not None:
        wanted["liger"] = lambda: liger.fused_call(inputs, hidden)
    out: dict[str, PathCost] = {}
    if adapters.live_head(calls.trainer, "reference") == "fused":
        wanted["reference"] = calls.trl_fused_head
    else:
        vocabulary = calls.inner.get_output_embeddings().weight.shape[0]
        need = 4 * 4 * hidden.shape[0] * hidden.shape[1] * vocabulary
        room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else MOST_CPU_BYTES
        if need <= room:
            wanted["reference"] = lambda: calls.full_logits(head)
        else:
            out["reference"] = PathCost(
                note=f"its logits need about {need / 2**30:.1f} GiB, more than may be spent here"
            )
    for name, call in wanted.items():
        out[name] = _cost(call, device)
    return out


def _cost(call: Call, device: torch.device) -> PathCost:
    call()
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return PathCost(time_ms=(time.perf_counter() - started) * 1e3, note="peak memory is measured on a GPU only")
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return PathCost(time_ms=begin.elapsed_time(end), peak_bytes=torch.cuda.max_memory_allocated(device) - before)
