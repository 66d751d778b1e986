"""Runs cases: the gate first, then every path; writes JSON that names device and versions."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any

import torch

import driftscope
from driftscope.bench.measure import Measurement, clear, measure_limit, measure_path
from driftscope.bench.paths import Entry, own_paths
from driftscope.bench.problem import Case, Problem, make_problem, truth
from driftscope.errors import DriftscopeError

# The fused path may exceed plain PyTorch's own error in the same dtype by this share, plus this much of the gradient.
GATE_SHARE = 1.05
GATE_EPSILON = {torch.bfloat16: 1e-4, torch.float16: 2e-5, torch.float32: 1e-6}
WRONG_FACTOR = 10.0  # a path whose error is this many times plain PyTorch's computes something else

SHAPES = ((16384, 4096, 151936), (16384, 896, 151936), (32768, 3584, 152064), (8192, 2048, 128256))
Peers = Callable[[Problem], list[Entry]]


class RedGateError(DriftscopeError):
    """The fused path is not as exact as plain PyTorch: no time is reported."""

    exit_code = 1


def cases(shapes: Iterable[tuple[int, int, int]] = SHAPES) -> list[Case]:
    """Every shape, trainable and frozen, dense and ragged."""
    return [
        Case(rows=n, hidden_size=d, vocabulary=v, trainable=trainable, ragged=ragged)
        for n, d, v in shapes
        for trainable in (True, False)
        for ragged in (False, True)
    ]


def check(measured: dict[str, Measurement], dtype: torch.dtype, case: Case) -> None:
    """Raise ``RedGateError`` where the fused path's error is over plain PyTorch's own."""
    plain = measured["plain PyTorch"]
    for name, fused in measured.items():
        if not name.startswith("driftscope"):
            continue
        if fused.failed or plain.failed:
            raise RedGateError(f"{case.name}: {fused.failed or plain.failed}")
        for what in ("hidden_error", "weight_error"):
            mine, bound = getattr(fused, what), getattr(plain, what)
            if mine is not None and not mine <= GATE_SHARE * bound + GATE_EPSILON[dtype]:
                raise RedGateError(
                    f"{case.name}: {name} has a {what.replace('_', ' ')} of {mine:.2e} where plain PyTorch has "
                    f"{bound:.2e}; no time is reported for a wrong result."
                )


def run_case(
    case: Case, dtype: torch.dtype, device: torch.device, peers: Peers | None = None, only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """One case as plain JSON types: the gate, then every path's times, memory and errors; ``only``: of these paths."""
    problem = make_problem(case, device, dtype)
    true = truth(problem)
    clear()
    own = own_paths(problem)
    gate = {e.name: measure_path(problem, true, e.name, e.path, e.note, timed=False) for e in own}
    check(gate, dtype, case)
    limit = measure_limit(problem.gemm_operations, dtype, device)
    entries = own + (peers(problem) if peers is not None else [])
    entries = [e for e in entries if not only or e.name in only]
    measured = [measure_path(problem, true, e.name, e.path, e.note, timed=True) for e in entries]
    result = {
        **asdict(case),
        "name": case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "scored_rows": problem.scored_rows,
        "active_rows": problem.active_rows,
        "limit_tflops": {k: v / 1e12 for k, v in asdict(limit).items()},
        "limit_ms": {k: problem.gemm_operations / v * 1e3 for k, v in asdict(limit).items()},
        "paths": [_with_verdict(m, gate["plain PyTorch"]) for m in measured],
    }
    del problem, true, own, entries
    clear()
    return result


def _with_verdict(measured: Measurement, plain: Measurement) -> dict[str, Any]:
    """A measurement with whether its gradient is the configured loss's at all."""
    right = None
    if measured.failed is None and measured.hidden_error is not None and plain.hidden_error is not None:
        right = measured.hidden_error <= WRONG_FACTOR * plain.hidden_error
    return {**asdict(measured), "right": right}


def environment(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "driftscope": driftscope.__version__}
    for package in ("triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def line(result: dict[str, Any]) -> list[str]:
    """A case as lines of text."""
    limit = result["limit_ms"]
    rates = result["limit_tflops"]
    out = [
        f"{result['name']}: GEMM limit {limit['rested']:.1f} ms rested, {limit['sustained']:.1f} ms sustained "
        f"({rates['burst']:.0f}, {rates['rested']:.0f}, {rates['sustained']:.0f} TFLOP/s burst, rested, sustained)"
    ]
    for p in result["paths"]:
        if p["failed"]:
            out.append(f"  {p['name']:<24} failed: {p['failed'][:160]}")
            continue
        weight = "" if p["weight_error"] is None else f"  dW {p['weight_error']:.5f}"
        out.append(
            f"  {p['name']:<24} {p['rested_ms']:8.1f} ms rested {p['sustained_ms']:8.1f} ms sustained "
            f"{p['peak_bytes'] / 1e9:6.2f} GB  dH {p['hidden_error']:.5f}{weight}{'' if p['right'] else '  WRONG'}"
        )
    return out


def write(path: FilePath, results: list[dict[str, Any]], extra: dict[str, Any]) -> None:
    """Write results as JSON, sorted by nothing: in the order they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**extra, "cases": results}, indent=1) + "\n", encoding="utf-8")
