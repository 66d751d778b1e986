"""Where each stage of Driftscope does its work, so that a test can break it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

# label -> the function that is made to fail; the label is the stage, with a word after it where a stage has several
STAGES = {
    "attach": "driftscope.hooks.scope:Probe",
    "capture": "driftscope.hooks.scope:Scope._keep_inputs",
    "capture begin": "driftscope.hooks.scope:Scope._begin",
    "capture forward": "driftscope.hooks.capture:RngState.read",
    "capture output": "driftscope.hooks.capture:Capture._after",
    "record": "driftscope.hooks.probe:Probe.analyse",
    "counts": "driftscope.hooks.probe:count_tokens",
    "config": "driftscope.hooks.adapters:spec_from_trainer",
    "is_ratio": "driftscope.is_ratio:describe_ratio",
    "mismatch": "driftscope.hooks.probe:measure_mismatch",
    "profile": "driftscope.hooks.probe:violations",
    "head": "driftscope.hooks.headpass:measure",
    "reference": "driftscope.hooks.probe:reference_algebra",
    "liger": "driftscope.hooks.shadow:LigerPath.algebra",
    "oracle": "driftscope.scene:coefficients",
    "compare": "driftscope.hooks.probe:solve_heads",
    "attribution": "driftscope.hooks.compare:attribute",
    "kept_mass": "driftscope.is_ratio:truncated_support",
    "canary": "driftscope.hooks.canary:Canary.look",
    "fused_call": "driftscope.hooks.shadow:LigerPath.fused_call",
    "corrected": "driftscope.hooks.correct:FusedHead.score",
    "param_norm": "driftscope.hooks.deep:add_micro_batch",
    "param_norm clipping": "driftscope.hooks.deep:DeepWindow.clipping",
    "param_norm close": "driftscope.hooks.deep:DeepWindow.close",
    "capsule": "driftscope.hooks.capsules:Capsules.offer",
    "capsule begin": "driftscope.hooks.capsules:Capsules.begin",
    "capsule save": "driftscope.hooks.capsules:Capsules.after_window",
    "drift": "driftscope.hooks.drift:DriftWatch.update",
    "rules": "driftscope.rules:evaluate",
    "records": "driftscope.hooks.recorder:Recorder.write",
    "journal": "driftscope.journal:encode",
    "metrics": "driftscope.hooks.recorder:metric_values",
    "run_info": "driftscope.hooks.recorder:describe_run",
    "run_info spec": "driftscope.hooks.recorder:Recorder.describe_spec",
    "report": "driftscope.dashboards.report:render",
    "console": "driftscope.dashboards.console:ConsoleReporter.alert",
    "window": "driftscope.hooks.scope:Scope.end_window",
}
# Tested elsewhere: they need several processes, a checkpoint, a used-up budget, or a loss without a graph.
ELSEWHERE = {"bias", "bias_load", "cadence", "gather", "ranks", "pack", "rank_journal", "gradient_flow"}


def break_it(monkeypatch: pytest.MonkeyPatch, place: str, error: Exception | None = None) -> list[int]:
    """Make a function raise; returns a list that counts its calls."""
    module_name, _, path = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    calls: list[int] = []

    def broken(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise error or RuntimeError("broken on purpose")

    monkeypatch.setattr(owner, name, broken)
    return calls
