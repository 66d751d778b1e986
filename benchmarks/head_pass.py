"""Time and memory of one spectrum head pass on a GPU, old way against new. Run from the repository root:

    python benchmarks/head_pass.py --out benchmarks/results/head-pass-h200.json

*Autograd*: fused log-probs, their gradient by the hidden states (which computes the head's weight's too), products of
float64 copies. *Directions*: one pass over the head, two products a tile. Both in ``spectrum.measure``. Accuracy comes
first: each way's directions against float32 logits on a few rows, and the residual of a gradient that plain PyTorch
made. Times are medians of CUDA events; the two ways take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from driftscope.kernels import Directions, fused_linear_logprobs, linear_directions  # noqa: E402
from driftscope.spectrum import FUSED_ROWS, Head, Spectrum, measure, solve  # noqa: E402

SIZES = ((6144, 896, 151936), (8192, 2048, 151936))
WORKSPACE_BYTES = 512 << 20  # the default of DriftscopeConfig
TRUTH_ROWS = 256
TEMPERATURE = 0.9
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-3}  # of a direction's error; TF32 may be on


def problem(rows: int, size: int, vocabulary: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Hidden states, a trainable head, targets, and the hidden gradient that plain PyTorch's backward gives."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(rows, size, generator=g, device=device).to(dtype)
    weight = (torch.randn(vocabulary, size, generator=g, device=device) * 3.0 / size**0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=g, device=device)
    coefs = torch.randn(rows, generator=g, device=device) / rows
    parts = []
    for part in torch.arange(rows, device=device).split(TRUTH_ROWS):
        leaf = hidden[part].requires_grad_(True)
        log_p = ((leaf @ weight.t()).float() / TEMPERATURE).log_softmax(-1)
        loss = (log_p.gather(-1, targets[part, None])[:, 0] * coefs[part]).sum()
        parts.append(torch.autograd.grad(loss, leaf)[0].float())
    return {"hidden": hidden, "weight": weight.requires_grad_(True), "targets": targets, "grad": torch.cat(parts)}


def heads(weight: Tensor) -> dict[str, Head]:
    """The two ways to the same head."""
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "workspace_bytes": WORKSPACE_BYTES}

    def fused(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logps, entropies = fused_linear_logprobs(hidden, weight, targets, with_entropy=True, **settings)
        assert entropies is not None
        return logps, entropies

    def directions(hidden: Tensor, targets: Tensor, entropy: bool) -> Directions:
        return linear_directions(hidden, weight, targets, with_entropy=entropy, **settings)

    def logits(hidden: Tensor) -> Tensor:
        return hidden @ weight.t()

    return {"autograd": Head(logits, fused), "directions": Head(logits, fused, directions)}


def old_way(head: Head, p: dict[str, Tensor], entropy: bool) -> Tensor:
    """The head pass as it was before there were directions; |u|^2."""
    assert head.fused is not None
    squares = []
    for start in range(0, p["hidden"].shape[0], FUSED_ROWS):
        part = slice(start, start + FUSED_ROWS)
        leaf, grad = p["hidden"][part].detach().requires_grad_(True), p["grad"][part].double()
        logps, entropies = head.fused(leaf, p["targets"][part])
        u = torch.autograd.grad(logps.sum(), leaf, retain_graph=entropy)[0].double()
        products = [(grad * grad).sum(-1), (u * u).sum(-1), (grad * u).sum(-1)]
        if entropy:
            w = torch.autograd.grad(entropies.sum(), leaf)[0].double()
            products += [(u * w).sum(-1), (w * w).sum(-1), (grad * w).sum(-1)]
        squares.append(products[1])
    return torch.cat(squares)


def new_way(head: Head, p: dict[str, Tensor], entropy: bool) -> Spectrum:
    """The head pass as it is."""
    return measure(
        {"model": head}, p["hidden"], p["targets"], p["grad"], temperature=TEMPERATURE, rows=1, entropy=entropy
    )


def accuracy(head: Head, p: dict[str, Tensor]) -> dict[str, float]:
    """Error of u on some rows, relative, against float32 logits; residual of the gradient that PyTorch made."""
    few = slice(0, TRUTH_ROWS)
    weight = p["weight"].detach().double()
    z = p["hidden"][few].double() @ weight.t() / TEMPERATURE
    true = (weight[p["targets"][few]] - z.softmax(-1) @ weight) / TEMPERATURE
    found = new_way(head, {k: v if k == "weight" else v[few] for k, v in p.items()}, False)
    uu = true.square().sum(-1)
    error = float(((found.views["model"].uu_N - uu).abs() / uu).max()) / 2
    return {"norm_error": error, "residual": solve(new_way(head, p, False), "model").residual}


def timed(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds and peak bytes of each way; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    for turn in range(rounds + 3):
        for name, way in ways.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            way()
            end.record()
            end.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - before
            if turn >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: {"ms": statistics.median(times[name]), "peak_bytes": float(peaks[name])} for name in ways}


def case(sizes: tuple[int, int, int], dtype: torch.dtype, entropy: bool, rounds: int) -> dict[str, Any]:
    """One size: accuracy of both ways, then times. Raises ``SystemExit`` for a way that is not accurate."""
    p = problem(*sizes, dtype, "cuda")
    both = heads(p["weight"])
    found = {name: accuracy(head, p) for name, head in both.items()}
    for name, figures in found.items():
        if not max(figures.values()) < LIMITS[dtype]:
            raise SystemExit(f"{name} is not accurate: {figures}; no time is reported.")
    times = timed(
        {
            "autograd": lambda: old_way(both["autograd"], p, entropy),
            "directions": lambda: new_way(both["directions"], p, entropy),
        },
        rounds,
    )
    rows, size, vocabulary = sizes
    return {
        "rows": rows, "hidden_size": size, "vocabulary": vocabulary, "dtype": str(dtype).removeprefix("torch."),
        "entropy": entropy, "ways": {name: {**times[name], **found[name]} for name in both},
        "speedup": times["autograd"]["ms"] / times["directions"]["ms"],
    }  # fmt: skip


def main() -> int:
    """Run every case, print a line for each, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write results as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each way")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/head_pass.py needs a GPU: it times device work.", file=sys.stderr)
        return 2
    results = []
    for sizes in SIZES:
        for entropy in (False, True):
            results.append(case(sizes, getattr(torch, args.dtype), entropy, args.rounds))
            print(json.dumps(results[-1]), flush=True)
    if args.out is not None:
        versions = {"torch": torch.__version__}
        document = {"device": torch.cuda.get_device_name(), "versions": versions, "results": results}
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
