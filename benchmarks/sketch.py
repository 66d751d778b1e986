"""The gradient sketch: time and bandwidth of one pass over a gradient, and its error against float64.

Use: python benchmarks/sketch.py [--elements N] [--size K] [--out FILE]

Cases: one flat gradient, and the parameters of a 0.5B model (24 layers, D=896, V=151,936) one after the other, as the
deep probe meets them. Times are medians over repeats after a warm-up. ``row_error``: |row - float64 row| / |row|.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftscope.kernels import sketch_torch
from driftscope.kernels.sketch import sketch_row
from driftscope.kernels.sketch_torch import keys_of
from driftscope.sketch import GradientSketch, Pair, SketchLayout, ratio

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
REPEATS = 15
LAYER = {
    "self_attn.q_proj.weight": (896, 896), "self_attn.q_proj.bias": (896,), "self_attn.k_proj.weight": (128, 896),
    "self_attn.k_proj.bias": (128,), "self_attn.v_proj.weight": (128, 896), "self_attn.v_proj.bias": (128,),
    "self_attn.o_proj.weight": (896, 896), "mlp.gate_proj.weight": (4864, 896), "mlp.up_proj.weight": (4864, 896),
    "mlp.down_proj.weight": (896, 4864), "input_layernorm.weight": (896,), "post_attention_layernorm.weight": (896,),
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Parameters of a 0.5B model with untied embeddings, 630 million elements."""
    layers = {f"model.layers.{i}.{name}": shape for i in range(24) for name, shape in LAYER.items()}
    ends = {"model.embed_tokens.weight": (151_936, 896), "lm_head.weight": (151_936, 896), "model.norm.weight": (896,)}
    return {**layers, **ends}


def timed_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Median milliseconds of a call, the device waited for."""
    times = []
    for repeat in range(REPEATS + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 3:
            times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Device memory beyond what was allocated before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def flat_case(elements: int, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One flat gradient: the kernel, the norm that PyTorch computes (a plain read), and the plain version."""
    values = torch.randn(elements, device=device, dtype=dtype)
    keys, read = keys_of(0, 0), elements * values.element_size()
    row = sketch_row(values, keys, size)
    true = sketch_torch.flat_sketch(values, 0, keys, size)
    ms = timed_ms(lambda: sketch_row(values, keys, size), device)
    plain = timed_ms(lambda: torch.linalg.vector_norm(values, dtype=torch.float32), device)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "elements": elements,
        "size": size,
        "time_ms": ms,
        "gb_per_s": read / ms / 1e6,
        "vector_norm_ms": plain,
        "peak_bytes": peak_bytes(lambda: sketch_row(values, keys, size), device),
        "row_error": float((row - true).norm() / true.norm()),
        "norm_error": abs(float(row.norm()) / float(values.float().norm()) - 1),
        "same_bits": bool(torch.equal(row, sketch_row(values, keys, size))),
    }


def model_case(size: int, dtype: torch.dtype, device: torch.device, scale: int) -> dict[str, Any]:
    """A model's parameters one after the other, and the norm ratio of two gradients at an angle of 0.8."""
    sizes = {name: (max(shape[0] // scale, 1), *shape[1:]) for name, shape in shapes().items()}
    layout = SketchLayout.of({name: torch.Size(shape).numel() for name, shape in sizes.items()}, size)
    a = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in sizes.items()}
    b = {name: 0.7 * g + 0.72 * torch.randn_like(g) for name, g in a.items()}

    def sketched(grads: dict[str, Tensor]) -> GradientSketch:
        sketch = GradientSketch(layout)
        for name, grad in grads.items():
            sketch.add(name, grad)
        return sketch

    found = ratio(Pair.of(sketched(a), sketched(b)))
    squares = [sum(float(g.float().norm()) ** 2 for g in grads.values()) for grads in (a, b)]
    assert found is not None
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": len(sizes),
        "elements": sum(g.numel() for g in a.values()),
        "rows": len(layout.rows),
        "size": size,
        "time_ms": timed_ms(lambda: sketched(a), device),
        "sketch_bytes": sketched(a).rows_RK.numel() * 8,
        "peak_bytes": peak_bytes(lambda: sketched(a), device),
        "norm_ratio_error": found.value / (squares[0] / squares[1]) ** 0.5 - 1,
        "claimed_error": found.error / found.value,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=500_000_000)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument(
        "--scale", type=int, default=1, help="divides the model's first dimensions, to try it on a CPU"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    out = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "flat": [flat_case(args.elements, args.size, dtype, device) for dtype in DTYPES.values()],
        "model": [model_case(args.size, dtype, device, args.scale) for dtype in (torch.bfloat16, torch.float32)],
    }
    text = json.dumps(out, indent=1) + "\n"
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
