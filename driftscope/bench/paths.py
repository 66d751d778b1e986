"""The paths that need nothing but this package: its kernels, and plain PyTorch.

A path is a function of leaf tensors (hidden (N, D), weight (V, D)) that returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from driftscope.bench.problem import Problem, policy_loss
from driftscope.kernels import fused_linear_grpo, fused_linear_grpo_loss, fused_linear_logprobs

Path = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """A path to measure. ``note``: what it leaves out or does otherwise than the others."""

    name: str
    path: Path
    note: str = ""


def own_paths(problem: Problem, workspace_bytes: int | None = None) -> list[Entry]:
    """The fused loss in one pass, in two, and, on ragged batches, without silent tokens' log-probs; plain PyTorch."""

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden_BTD = hidden.view(*problem.targets_BT.shape, -1)
        return fused_linear_grpo(
            hidden_BTD, weight, problem.targets_BT, problem.batch, problem.spec, workspace_bytes=workspace_bytes
        ).loss

    def loss_only(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden_BTD = hidden.view(*problem.targets_BT.shape, -1)
        return fused_linear_grpo_loss(
            hidden_BTD, weight, problem.targets_BT, problem.batch, problem.spec, workspace_bytes=workspace_bytes
        )

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        return policy_loss(problem, log_p.gather(-1, problem.targets_BT.reshape(-1, 1)).squeeze(-1))

    def two_passes(hidden: Tensor, weight: Tensor) -> Tensor:
        targets_N = problem.targets_BT.reshape(-1)
        mask_N = problem.batch.completion_mask_BT.reshape(-1)
        logps, _ = fused_linear_logprobs(
            hidden, weight, targets_N, with_entropy=True, mask=mask_N, workspace_bytes=workspace_bytes
        )
        return policy_loss(problem, logps)

    entries = [
        Entry("driftscope", fused),
        Entry("driftscope, two passes", two_passes, "log-probs, then any loss: as for sequence-level ratios"),
    ]
    if problem.case.ragged:
        entries.append(Entry("driftscope, loss only", loss_only, "no log-probs of tokens without a gradient"))
    return [*entries, Entry("plain PyTorch", plain, "no entropies")]
