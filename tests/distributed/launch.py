"""Starts a real GRPO trainer in several processes (gloo on the CPU, NCCL on GPUs) and reads what they leave.

``launch(tmp_path, mode="ddp", attached=True, steps=2, settings={...}, fail="module:qualname@rank")`` -> ``Result``.
``mode="one"`` trains on the same global batch in a single process, cut into the same micro-batches.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).resolve().parents[2]
Mode = Literal["one", "ddp", "fsdp1", "fsdp2", "zero2", "zero3"]
SHARDED = ("fsdp1", "fsdp2", "zero2", "zero3")
TIMEOUT_S = 240.0
COLLECTIVE_TIMEOUT_S = 90
DEEPSPEED = ROOT / ".venv" / "deepspeed"
HAS_DEEPSPEED = DEEPSPEED.is_dir() or importlib.util.find_spec("deepspeed") is not None
NO_DEEPSPEED = "DeepSpeed is not installed: python3 scripts/setup_env.py seed current --deepspeed"
# What a launcher or an earlier trainer may have left in this process, and what would change the workers.
FOREIGN = ("ACCELERATE_", "FSDP_", "DS_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "OMP_NUM")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process of one run does. Written as JSON, read by ``tests.distributed.worker``.

    settings: fields of ``DriftscopeConfig``. arguments: fields of ``GRPOConfig``. model: overrides of the tiny model's
    configuration. log_ratio: size of the injected log importance sampling ratio of a token; ``None`` for none.
    fail: ``module:qualname@rank``, a function that raises on one rank. forbid: raise where a collective runs during
    the head pass on rank 0. wrap: classes of modules that FSDP2 wraps by themselves. head_bias: give
    the output head a bias.
    """

    directory: str
    mode: Mode
    processes: int = 2
    attached: bool = True
    steps: int = 2
    seed: int = 0
    arch: str = "qwen2"
    device: Literal["cpu", "cuda"] = "cpu"
    liger: bool = False
    lora: list[str] | None = None
    forbid: bool = False
    log_ratio: float | None = None
    fail: str | None = None
    wrap: list[str] | None = None
    head_bias: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return Path(self.directory) / "run"


@dataclass(frozen=True)
class Result:
    """What a run left: its full weights by name, Driftscope's run directory, and one report per process."""

    weights: dict[str, torch.Tensor]
    run_dir: Path
    ranks: list[dict[str, Any]]

    @property
    def records(self) -> list[Any]:
        """The step records that rank 0 wrote."""
        from tests.hooks.runs import steps_of

        return steps_of(self.run_dir)

    @property
    def alerts(self) -> list[Any]:
        """The alerts that rank 0 wrote."""
        from tests.hooks.runs import alerts_of

        return alerts_of(self.run_dir)


def launch(directory: Path, mode: Mode = "ddp", *, timeout_s: float = TIMEOUT_S, **job: Any) -> Result:
    """Run a job in its processes and wait for all of them; ``job`` are the fields of ``Job``.

    Raises AssertionError with the end of the log of the first process that failed, or of all where time ran out.
    Every process has ended when this returns.
    """
    made = Job(directory=str(directory), mode=mode, **job)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "job.json"
    path.write_text(json.dumps(asdict(made)), encoding="utf-8")
    count = 1 if mode == "one" else made.processes
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, environment in enumerate(environments(made, count)):
            with open(_log(directory, rank), "wb") as log:
                command = [sys.executable, "-m", "tests.distributed.worker", str(path)]
                started.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        _wait(directory, started, time.monotonic() + timeout_s)
    finally:
        for process in started:
            _kill(process)
    ranks = [json.loads((directory / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    return Result(torch.load(directory / "weights.pt", weights_only=True), made.run_dir, ranks)


def environments(job: Job, count: int) -> list[dict[str, str]]:
    """The environment of each process, as a launcher would set it."""
    common = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    zero = job.mode.startswith("zero")
    paths = [str(ROOT), *([str(DEEPSPEED)] if zero else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    common |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONFAULTHANDLER": "1"}
    if job.device == "cpu":
        common["CUDA_VISIBLE_DEVICES"] = ""
        # accelerate shards nothing where the CPU is asked for by name
        common |= {"ACCELERATE_TORCH_DEVICE": "cpu"} if job.mode in SHARDED else {"ACCELERATE_USE_CPU": "true"}
    if job.mode in ("fsdp1", "fsdp2"):
        common |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": job.mode[-1],
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT" if job.mode == "fsdp2" else "FULL_STATE_DICT",
        }
        if job.mode == "fsdp1":
            common["FSDP_USE_ORIG_PARAMS"] = "true"
        if job.wrap:
            common["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(job.wrap)
    if zero:
        common |= {"DS_ACCELERATOR": job.device, "ACCELERATE_USE_DEEPSPEED": "true"}
    if count == 1:
        return [common | ({"CUDA_VISIBLE_DEVICES": "0"} if job.device == "cuda" else {})]
    rendezvous = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    common |= rendezvous | {"MASTER_PORT": str(_free_port())}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _wait(directory: Path, started: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended well; raises as soon as one has not."""
    waiting = dict(enumerate(started))
    while waiting:
        for rank, process in list(waiting.items()):
            code = process.poll()
            if code is not None:
                del waiting[rank]
                assert code == 0, f"rank {rank} ended with {code}:\n{_tail(directory, rank)}"
        if waiting and time.monotonic() > deadline:
            ends = "\n".join(f"-- rank {rank}:\n{_tail(directory, rank)}" for rank in range(len(started)))
            raise AssertionError(f"rank {sorted(waiting)} had not ended in time:\n{ends}")
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.log"


def _tail(directory: Path, rank: int) -> str:
    return _log(directory, rank).read_text(encoding="utf-8", errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
