"""``driftscope bench``: is the fused loss right on this machine, and what does it cost? Imports torch when it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driftscope.errors import EXIT_CLEAN, UsageError

if TYPE_CHECKING:
    from driftscope.bench.problem import Case
    from driftscope.bench.run import Peers

SCALING_ROWS = (2048, 4096, 8192, 16384, 32768)
SCALING_VOCABULARIES = (16384, 32768, 65536, 131072, 262144)


@click.command()
@click.option("--shape", "shapes", multiple=True, metavar="N,D,V", help="Sizes to measure instead of the four usual.")
@click.option("--scaling", is_flag=True, help="Measure over growing N and V instead, for the plot.")
@click.option("--peers", type=click.Path(path_type=Path, exists=True), help="Python file with peers(problem).")
@click.option("--out", type=click.Path(path_type=Path), help="Write JSON here, and a plot beside it with --scaling.")
@click.option("--head", type=click.Choice(["trainable", "frozen"]), help="Only this kind of head.")
@click.option("--path", "only", multiple=True, metavar="NAME", help="Only these paths, by name; more than once.")
@click.option("--batch", type=click.Choice(["dense", "ragged"]), help="Only this kind of batch.")
def bench(
    shapes: tuple[str, ...],
    scaling: bool,
    peers: Path | None,
    out: Path | None,
    head: str | None,
    only: tuple[str, ...],
    batch: str | None,
) -> int:
    """Check the fused loss against plain PyTorch, then time it.

    Without a CUDA device only the check runs, on a small problem: timings need a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return _check_only(torch)
    from driftscope.bench.plot import scaling_plot
    from driftscope.bench.run import cases, environment, line, run_case, write

    device = torch.device("cuda")
    chosen = _scaling_cases() if scaling else cases(_sizes(shapes)) if shapes else cases()
    chosen = [c for c in chosen if head in (None, "trainable" if c.trainable else "frozen")]
    chosen = [c for c in chosen if batch in (None, "ragged" if c.ragged else "dense")]
    found, versions = _peers(peers)
    results: list[dict[str, Any]] = []
    for case in chosen:
        results.append(run_case(case, torch.bfloat16, device, found, only))
        click.echo("\n".join(line(results[-1])))
        if out is not None:
            write(out, results, {**environment(device), "peers": versions})
    if out is not None and scaling:
        out.with_suffix(".svg").write_text(scaling_plot(results), encoding="utf-8")
    return EXIT_CLEAN


def _check_only(torch: Any) -> int:
    """The gate on a small problem in float32, on the CPU."""
    from driftscope.bench.measure import measure_path
    from driftscope.bench.paths import own_paths
    from driftscope.bench.problem import Case, make_problem, truth
    from driftscope.bench.run import check

    device = torch.device("cpu")
    for trainable in (True, False):
        case = Case(rows=96, hidden_size=48, vocabulary=1003, trainable=trainable, ragged=False)
        problem = make_problem(case, device, torch.float32)
        true = truth(problem)
        found = {
            e.name: measure_path(problem, true, e.name, e.path, e.note, timed=False)
            for e in own_paths(problem, workspace_bytes=64 << 10)
        }
        check(found, torch.float32, case)
        for name, m in found.items():
            click.echo(f"{case.name}: {name}: relative error of the hidden gradient {m.hidden_error:.1e}")
    click.echo("The fused loss is right here. No CUDA device: timings need a GPU.")
    return EXIT_CLEAN


def _sizes(shapes: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """``N,D,V`` as numbers."""
    sizes = []
    for text in shapes:
        try:
            n, d, v = (int(part) for part in text.split(","))
        except ValueError:
            raise UsageError(f"--shape {text!r}: give three numbers, N,D,V, as in 16384,4096,151936.") from None
        sizes.append((n, d, v))
    return sizes


def _scaling_cases() -> list[Case]:
    from driftscope.bench.problem import Case

    sizes = [(n, 4096, 131072) for n in SCALING_ROWS]
    sizes += [(8192, 4096, v) for v in SCALING_VOCABULARIES if v != 131072]
    return [
        Case(rows=n, hidden_size=d, vocabulary=v, trainable=trainable)
        for trainable in (True, False)
        for n, d, v in sizes
    ]


def _peers(path: Path | None) -> tuple[Peers | None, dict[str, str]]:
    """The function ``peers`` of a Python file, and what its ``versions`` says."""
    if path is None:
        return None, {}
    spec = importlib.util.spec_from_file_location("driftscope_peers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "peers"):
        raise UsageError(f"--peers {path}: this file has no function peers(problem).")
    found: Peers = module.peers
    return found, module.versions() if hasattr(module, "versions") else {}
