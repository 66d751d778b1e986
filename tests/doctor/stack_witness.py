"""A second opinion on the stack probe, without oracle and algebra: does a path's gradient move when a term moves?

Real trainers are built as the probe builds them; then one input or setting of a term is changed, and the gradient of
the parameters under the head is taken before and after. Run as a script it prints the probe's table, these reactions,
what the source hands to Liger, and what the rules foresee, as JSON: for a pair of TRL and Liger that PYTHONPATH puts
in front of the stack's own.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from driftscope.doctor.facts import Facts, Settings
from driftscope.doctor.foresee import foresee
from driftscope.hooks import adapters
from driftscope.hooks.doctor.features import PLAIN, Feature, Head, catalogue
from driftscope.hooks.doctor.stack import probe_stack
from driftscope.hooks.doctor.stack_rig import Rig, known
from driftscope.hooks.doctor.stack_state import untouched

SAME = 1e-5  # relative; float32


def _ratio(inputs: dict[str, Any]) -> None:
    inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"] * 0.5


def _items(inputs: dict[str, Any]) -> None:
    inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * 2


def _tools(inputs: dict[str, Any]) -> None:
    inputs["tool_mask"] = torch.ones_like(inputs["tool_mask"])


def _softcap(model: Any) -> None:
    model.config.final_logit_softcapping = 30.0


def _scale(model: Any) -> None:
    model.logit_scale *= 2
    model.config.logit_scale *= 2


def _adapter(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lm_head.lora_B" in name:
            parameter.data.zero_()


INPUTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "is_correction": _ratio,
    "normalizer": _items,
    "tool_mask": _tools,
}
MODELS: dict[str, Callable[[Any], None]] = {
    "logit_softcap": _softcap,
    "logit_scale": _scale,
    "head_adapter": _adapter,
}
SETTINGS: dict[str, dict[str, Any]] = {  # terms that are settings: the value that switches them off
    "kl_bias_correction": {"use_bias_correction_kl": False},
    "delta": {"delta": None},
    "importance_sampling_level=sequence": {"importance_sampling_level": "token"},
    "temperature": {"temperature": 1.0},
}


def reactions(path: str) -> dict[str, bool | str]:
    """Feature -> whether the path's gradient moves with it, or the error that the path raises."""
    found: dict[str, bool | str] = {}
    features = {f.name: f for f in catalogue(Settings(), Head(), tools=False, processes=1)}
    with untouched(), tempfile.TemporaryDirectory() as scratch:
        rig = Rig(Path(scratch))
        for name in (*INPUTS, *MODELS, *SETTINGS):
            try:
                found[name] = _reacts(rig, features[name], path)
            except (ValueError, NotImplementedError) as error:
                found[name] = str(error)
    return found


def _reacts(rig: Rig, feature: Feature, path: str) -> bool:
    name, liger = feature.name, path == "liger"
    settings = known({**PLAIN, **feature.settings})
    trainer = rig._trainer(feature, dict(settings), liger=liger)
    inputs = rig._inputs(feature, trainer)
    before = _gradient(trainer, inputs)
    if name in INPUTS:
        INPUTS[name](inputs)
    if name in MODELS:
        MODELS[name](rig._made(feature.variant))  # trainers are given copies of it
    trainer = rig._trainer(feature, {**settings, **SETTINGS.get(name, {})}, liger=liger)
    after = _gradient(trainer, inputs)
    return float((after - before).norm() / before.norm()) > SAME


def _gradient(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The gradient of every parameter under the head, as one vector."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(inputs)).backward()
    return torch.cat(
        [p.grad.flatten() for n, p in trainer.model.named_parameters() if p.grad is not None and "lm_head" not in n]
    )


def handed_to_liger() -> str:
    """The calls in TRL's source that build its fused loss and give it the batch, without spaces; empty without one."""
    from trl import GRPOTrainer

    if not hasattr(GRPOTrainer, "compute_liger_loss"):
        return ""
    calls = []
    for method in (GRPOTrainer.__init__, GRPOTrainer.compute_liger_loss):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if "FusedLinearGRPOLoss" in name or name in ("self.liger_grpo_loss", "self.liger_loss"):
                calls.append(ast.unparse(node))
    return "".join(calls).replace(" ", "") + inspect.getsource(GRPOTrainer.compute_liger_loss).replace(" ", "")


def foreseen(**values: Any) -> list[str]:
    """The codes that the rules find for a configuration."""
    return list(foresee(Facts(stack=probe_stack(Settings(values=values)))).rules)


def report() -> dict[str, Any]:
    """The probe's table, the second opinions, and findings."""
    table = probe_stack()
    from trl import GRPOTrainer

    paths = ["reference", *(["liger"] if adapters.has_liger_loss(object.__new__(GRPOTrainer)) else [])]
    return {
        "handed_to_liger": handed_to_liger(),
        "foreseen": {
            "seed": foreseen(use_liger_kernel=True, use_vllm=True, gradient_accumulation_steps=4),
            "kl": foreseen(use_liger_kernel=True, beta=0.1, use_bias_correction_kl=True, loss_type="dr_grpo"),
            "luspo": foreseen(use_liger_kernel=True, loss_type="luspo"),
            "own luspo": foreseen(use_liger_kernel=False, loss_type="luspo"),
            "plain": foreseen(use_liger_kernel=True, loss_type="dr_grpo"),
        },
        "versions": dict(table.versions),
        "seconds": table.seconds,
        "rows": [dataclasses.asdict(row) for row in table.rows],
        "reactions": {path: reactions(path) for path in paths},
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(report(), sys.stdout)
