"""Journals for the tests of reading at scale: small random ones, and long ones made of real-looking windows."""

from __future__ import annotations

import json
import random
from pathlib import Path

from driftscope.journal import encode
from driftscope.records import (
    AlertRecord,
    BiasRecord,
    CadenceRecord,
    Estimate,
    GradientRecord,
    ModuleGradient,
    NoteRecord,
    RankRow,
    RanksRecord,
    StepRecord,
    ViolationRecord,
)
from driftscope.thinning import slim, thin
from driftscope.verdict import judge
from tests.dashboards.simulated import run_info, step_record
from tests.record_factory import alert, seed_step, step

RULES = ("DS101", "DS201", "DS202", "DS211", "DS901", "XX900")


def with_processes(record: StepRecord, processes: int = 4) -> StepRecord:
    """The record as several ranks give it, with its full-parameter gradients and the cadence."""
    rng = random.Random(record.step)
    rows = [
        RankRow(rank=r, tokens=90 + r, normalizer=432.0, normalizer_measured=432.0 + (r == 2), loss=0.01 * r,
                hidden_grad_norm=0.2, coef_error=1e-7, is_ratio_mean=0.8, residual=3e-7, step_ms=100.0 + 30 * (r == 3),
                overhead_ms=1.0)
        for r in range(processes)
    ]  # fmt: skip
    ranks = RanksRecord(
        processes=processes, rows=rows, slowest=3, slowest_ms=130 + rng.gauss(0, 2), median_ms=100.0,
        disagree={"normalizer_measured": [2]} if record.step % 2 else {}, missing=[1] if record.step == 3 else [],
    )  # fmt: skip
    modules = [ModuleGradient(name=f"layers.{i}.mlp", candidate=2.0, reference=1.9, cosine=0.99, share=0.5**i) for i in
               range(1, 5)]  # fmt: skip
    gradient = GradientRecord(
        method="sketch", size=4096, candidate="liger", reference="reference",
        norms={"liger": Estimate(value=2.1, error=0.02), "reference": Estimate(value=1.9, error=0.02)},
        norm_ratio=Estimate(value=1.1 * rng.lognormvariate(0, 0.01), error=0.01),
        cosine=Estimate(value=0.98, error=0.01),
        difference=Estimate(value=0.2, error=0.01), modules=modules, accumulated=Estimate(value=1e-3, error=1e-4),
        bias=BiasRecord(steps=3, size=Estimate(value=0.01, error=0.002), noise=0.1, score=5.0),
    )  # fmt: skip
    cadence = CadenceRecord(spectrum_every=20, deep_every=1000, spent=0.02 + rng.gauss(0, 1e-3), budget=0.02)
    return record.model_copy(update={"ranks": ranks, "gradient": gradient, "cadence": cadence})


def random_records(seed: int) -> list[StepRecord | AlertRecord | NoteRecord]:
    """A run of a few windows in file order, with everything that a record may lack or hold."""
    rng = random.Random(seed)
    out: list[StepRecord | AlertRecord | NoteRecord] = []
    for number in range(1, rng.randint(2, 14)):
        tier = rng.choice(("light", "spectrum", "spectrum", "deep"))
        judged = rng.random() < 0.5
        size = 1 if tier == "light" else rng.choice((1, 4))
        window = [_random_step(rng, number, micro, tier) for micro in range(size)]
        out += [record.model_copy(update={"judged": judged}) for record in window]
        for _ in range(rng.choice((0, 0, 1, 3))):
            severity = rng.choice(("info", "warning", "critical"))
            text = {"title": f"T{rng.randint(0, 9)}", "evidence": f"log_gap {rng.random()}"}
            out.append(alert(rng.choice(RULES), severity, number, rank=rng.choice((0, 0, 1)), **text))
        if rng.random() < 0.1:
            out.append(NoteRecord(step=number, stage="shadow", message=f"ValueError: {rng.randint(0, 2)}"))
    return out


def _random_step(rng: random.Random, number: int, micro: int, tier: str) -> StepRecord:
    make = rng.choice(("factory", "seed", "simulated"))
    if make == "simulated":
        record = step_record(number, micro, seed=rng.randint(0, 9), deep=tier == "deep")
    elif make == "seed":
        record = seed_step(number, micro_step=micro)
    else:
        record = step(step=number, micro_step=micro, ratio=rng.choice((1.0, 0.0, 3.0)), live=rng.choice(("liger",
                      "reference")), causes=[("normalizer", 0.7, rng.choice((2.0, None)))], left=0.3)  # fmt: skip
    record = record.model_copy(update={"tier": tier})
    if tier == "light":
        keep = {n: record.paths[n].model_copy(update={"hidden_grad_norm": None}) for n in [record.live]}
        none = dict.fromkeys(("gap", "unexplained", "residual", "mismatch", "canary"))
        record = record.model_copy(update={**none, "paths": keep, "causes": [], "scatter": []})
    lost = [n for n in ("gap", "is_ratio", "residual", "unexplained", "step_ms", "mismatch") if rng.random() < 0.1]
    changes: dict[str, object] = dict.fromkeys(lost)
    if rng.random() < 0.15:
        changes["live_grad_norm"] = rng.choice((float("nan"), float("inf"), 0.0, -1.0, 7.5))
    if rng.random() < 0.15:
        changes["unavailable"] = {rng.choice(("shadow", "canary", "drift")): f"because {rng.randint(0, 1)}"}
    if rng.random() < 0.1:
        changes["violations"] = [ViolationRecord(limit="k3", figure="divergence.k3", value=rng.random(), allowed=0.1,
                                                 nominal=0.1)]  # fmt: skip
    record = record.model_copy(update=changes)
    return with_processes(record) if rng.random() < 0.2 else record


def write(directory: Path, records: list[StepRecord | AlertRecord | NoteRecord], seed: int | None = None) -> Path:
    """Write a journal; with a seed also lines that are damaged, unknown, blank or slimmed, and a torn end."""
    rng = random.Random(seed)
    lines = []
    for record in records:
        data = encode(record)
        if seed is not None and isinstance(record, StepRecord) and rng.random() < 0.5:
            data = slim(data, exact=True)
        line = json.dumps(data, separators=rng.choice(((",", ":"), (", ", ": "))))
        lines.append(line)
        if seed is not None and rng.random() < 0.15:
            odd = [line[: len(line) // 2], "", "[]", '{"kind":"later","schema":1}', "\x00\xff", '{"kind":"step"}',
                   line.replace('"live":', '"lie":', 1), line.replace("null", "NaN", 1), '{"a":"\\ud800"}',
                   line.replace('"share":', '"share":null,"x":', 1),
                   line.replace('"step":', '"step":"x","y":', 1)]  # fmt: skip
            lines.append(rng.choice(odd))
    text = "\n".join(lines) + "\n"
    if seed is not None and rng.random() < 0.3:
        text += lines[0][:50]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(run_info().model_dump_json(by_alias=True), encoding="utf-8")
    (directory / "records.jsonl").write_text(text, encoding="utf-8")
    return directory


MARK = 987_654_321


def long_run(directory: Path, steps: int, spikes: dict[int, float], *, first: int = 1, append: bool = False) -> Path:
    """A run of many steps: a light record each, four micro-batches and an alert on each 20th, as a recorder writes it.

    spikes: step -> gap, or reported gradient norm on a light step, to stand there.
    """
    rng = random.Random(first)
    light = [_light(rng, i) for i in range(20)]
    full, short = _analysed(0), _analysed(1_000_001)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(run_info().model_dump_json(by_alias=True), encoding="utf-8")
    with (directory / "records.jsonl").open("a" if append else "w", encoding="ascii") as stream:
        for number in range(first, first + steps):
            if number % 20 == 1:
                lines = full if number < 200 else short
                at = (number // 20) % (len(lines) // 5) * 5
                block = [dict(data) for data in lines[at : at + 5]]
                if number in spikes:
                    block[0]["gap"] = {**block[0]["gap"], "grad_norm_ratio": spikes[number]}
            else:
                block = [dict(light[number % 20])]
                if number in spikes:
                    block[0]["live_grad_norm"] = spikes[number]
            for data in block:
                stream.write(json.dumps({**data, "step": number}, separators=(",", ":")) + "\n")
    return directory


def _light(rng: random.Random, i: int) -> dict[str, object]:
    record = step_record(i + 1, 3, seed=rng.randint(0, 99))
    keep = {"liger": record.paths["liger"].model_copy(update={"hidden_grad_norm": None})}
    none = dict.fromkeys(("gap", "unexplained", "residual", "mismatch", "canary"))
    record = record.model_copy(update={**none, "tier": "light", "paths": keep, "causes": [], "judged": True,
                                       "scatter": []})  # fmt: skip
    return slim(encode(thin(record, 1_000_001, False)))


def _analysed(index: int) -> list[dict[str, object]]:
    out = []
    for window in range(1, 4):
        for micro in range(4):
            record = step_record(window, micro, deep=micro == 3).model_copy(update={"judged": True})
            out.append(slim(encode(thin(record, index, False))))
        out.append(encode(alert("DS101", "critical", MARK)))
    return out


def outcome(run):
    """Verdict, number of records and problems of a run, however it was read."""
    return judge(run), run.problems, run.info, len(run.steps) if hasattr(run.steps, "__len__") else run.records
