"""Liger's own loss code called again as the trainer called it, without the trainer.

A trainer's call is kept as data: the loss module's settings, which tensor of the capsule went into which argument, and
what the trainer multiplied the result by. Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftscope.batch import Coefficients
from driftscope.capsule.format import Capsule
from driftscope.kernels import liger

POLICY_MASK = "completion_mask * tool_mask"


def again(capsule: Capsule, logps_BT: Tensor) -> Coefficients:
    """Loss and coefficients of Liger's own loss on given log-probs (B, T), as the trainer called it.

    Raises LookupError where the call is not in the capsule, ImportError where Liger is not installed.
    """
    call = capsule.measured["liger_call"]
    if call is None or call.get("why"):
        raise LookupError(call["why"] if call else "the capsule does not hold the trainer's call")
    logps = logps_BT.detach().clone().requires_grad_(True)
    sequences, length = logps.shape
    given = {name: _argument(capsule, value) for name, value in call["arguments"].items()}
    given["_input"] = logps.new_zeros(sequences, length, 1)  # only the fused call reads hidden states and weight
    given["lin_weight"] = logps.new_zeros(1, 1)
    module = liger.build_loss(call["settings"])
    with torch.enable_grad():
        loss: Tensor = liger.AlgebraOnly(module, logps)(**given)[0] * float(call["factor"])
    (grad,) = torch.autograd.grad(loss, [logps])
    return Coefficients(loss=float(loss.detach()), logps_BT=grad.detach())


def _argument(capsule: Capsule, value: Any) -> Any:
    """A saved argument: ``{"tensor": name}`` or a plain value."""
    if not isinstance(value, dict):
        return value
    name = value["tensor"]
    if name == POLICY_MASK:
        return capsule.tensors["completion_mask"] * capsule.tensors["tool_mask"]
    return capsule.tensors[name]
