"""The parts of the report on several processes, on full-parameter gradients and on what Driftscope spends.

Each is there only where a run has records of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from driftscope.dashboards import figures
from driftscope.dashboards.figures.processes import estimate
from driftscope.dashboards.series import getter, middle, whole_of
from driftscope.dashboards.tables import Table
from driftscope.dashboards.tiles import Tile
from driftscope.dashboards.wording import UNAVAILABLE, clean, count, number, path_label, percent
from driftscope.reading.events import Ranks
from driftscope.records import GradientRecord, RanksRecord, StepRecord

SHOWN_MODULES = 10
SHOWN_DISAGREEMENTS = 30


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    id: str
    title: str
    lead: str
    sentences: list[str] = field(default_factory=list)
    panels: list[figures.Panel] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True)
class ProcessesSection:
    """The sections that there are."""

    ranks: Part | None = None
    gradient: Part | None = None
    cadence: Part | None = None


def processes_section(steps: Sequence[StepRecord]) -> ProcessesSection:
    """What the report says of ranks, full gradients and the cadence."""
    return ProcessesSection(_ranks(steps), _gradient(steps), _cadence(steps))


def budget_tile(steps: Sequence[StepRecord]) -> list[Tile]:
    """What was spent against the budget, where there is one."""
    last = next((s.cadence for s in reversed(steps) if s.cadence is not None), None)
    if last is None or last.spent is None or last.budget is None:
        return []
    every = f"a spectrum every {count(last.spectrum_every, 'step')}" if last.spectrum_every else "no spectrum"
    return [Tile("Spent of the budget", f"{percent(last.spent)} of {percent(last.budget)}",
                 f"share of the run's step time; {every} at the end")]  # fmt: skip


def _cadence(steps: Sequence[StepRecord]) -> Part | None:
    panel = figures.cadence(steps)
    last = next((s.cadence for s in reversed(steps) if s.cadence is not None), None)
    if panel is None or last is None:
        return None
    words = [
        f"{name} every {count(every, 'step')}" if every else f"no {name}"
        for name, every in (("a spectrum step", last.spectrum_every), ("a deep step", last.deep_every))
    ]
    lead = "Driftscope keeps its cost within a budget by measuring less often where the steps are short."
    return Part("cost", "What the watching costs", lead, [f"At the end of the run: {', '.join(words)}."], [panel])


def _ranks(steps: Sequence[StepRecord]) -> Part | None:
    known = [(s, s.ranks) for s in steps if s.ranks is not None and s.ranks.processes > 1]
    if not known:
        return None
    panel, whole = figures.slowest(steps), whole_of(steps)
    tally = Ranks() if whole is None else whole.whole.processes
    for record, ranks in known if whole is None else ():
        tally.add(ranks.model_dump(exclude={"rows"}), record.step)
    return Part(
        "ranks", "Ranks",
        "What each process contributed. Normalisers, norms and losses are a rank's own, before the mean over ranks.",
        _rank_sentences(steps, known[-1][1], tally),
        [panel] if panel is not None else [],
        [t for t in (_rank_table(known), _disagreements(tally)) if t is not None],
    )  # fmt: skip


def _rank_sentences(steps: Sequence[StepRecord], last: RanksRecord, tally: Ranks) -> list[str]:
    out = [f"{count(last.processes, 'process', 'processes')}."]
    longest = tally.slowest.most_common(1)
    slow, typical = middle(steps, getter("ranks.slowest_ms")), middle(steps, getter("ranks.median_ms"))
    if longest and slow is not None and typical:
        out.append(
            f"The slowest rank needs {number(slow)} ms of its own, the median rank {number(typical)} ms (medians over "
            f"the steps); rank {longest[0][0]} is the slowest most often, on {longest[0][1]:,} of {tally.records:,} "
            "records."
        )
    if tally.missing:
        names = ", ".join(map(str, sorted(tally.missing)[:20]))
        out.append(f"Not in every record: the measurement of rank {names}.")
    return out


def _rank_table(known: Sequence[tuple[StepRecord, RanksRecord]]) -> Table | None:
    found = next(((s, r) for s, r in reversed(known) if r.rows), None)
    if found is None:
        return None
    record, ranks = found
    columns = [
        "Rank", "Trained tokens", "Normaliser, claimed", "Normaliser, measured", "Loss", "Hidden gradient norm",
        "Coefficient error", "IS ratio, mean", "Residual", "Step, ms", "Driftscope, ms", "Stages off",
    ]  # fmt: skip
    rows = [
        [
            str(r.rank), UNAVAILABLE if r.tokens is None else f"{r.tokens:,}", number(r.normalizer, 4),
            number(r.normalizer_measured, 4), number(r.loss), number(r.hidden_grad_norm), number(r.coef_error),
            number(r.is_ratio_mean, 4), number(r.residual), number(r.step_ms), number(r.overhead_ms), str(r.failed),
        ]
        for r in sorted(ranks.rows, key=lambda row: row.rank)
    ]  # fmt: skip
    some = f": {len(rows)} of {ranks.processes}, the most deviating" if len(rows) < ranks.processes else ""
    caption = f"The ranks at step {record.step:,}, micro-batch {record.micro_step + 1}{some}"
    return Table(caption, columns, rows, set(range(len(columns))))


def _disagreements(tally: Ranks) -> Table | None:
    rows = [
        [clean(what), ", ".join(map(str, d.ranks[:20])), f"{d.seen:,}", f"{d.first:,}", f"{d.last:,}"]
        for what, d in sorted(tally.disagree.items(), key=lambda item: -item[1].seen)[:SHOWN_DISAGREEMENTS]
    ]
    if not rows:
        return None
    columns = ["What should be the same", "Ranks on which it is not, last", "Records", "First step", "Last step"]
    return Table("What ranks disagree on", columns, rows, {2, 3, 4})


def _gradient(steps: Sequence[StepRecord]) -> Part | None:
    known = [(s, s.gradient) for s in steps if s.gradient is not None]
    if not known:
        return None
    record, last = known[-1]
    how = "exact" if last.method == "exact" else f"linear sketches of {count(last.size or 0, 'bucket')} a module"
    return Part(
        "gradients", "Full-parameter gradients",
        "The gradient over all trainable parameters, of both paths, over a whole accumulation window and all ranks.",
        [f"From {how}. {_bias_words(last)}".strip()],
        figures.gradient(steps),
        [_gradient_table(record, last), *_module_table(record, last)],
    )  # fmt: skip


def _bias_words(last: GradientRecord) -> str:
    bias = last.bias
    if bias is None:
        return ""
    noise = f"; one step's difference is {number(bias.noise)}" if bias.noise is not None else ""
    score = f", its square {number(bias.score)} standard errors from none" if bias.score is not None else ""
    where = f" The largest part of it is in {clean(bias.module)}." if bias.module else ""
    along = (
        f" Along the live gradient it is {estimate(bias.along)}: below zero what was accumulated is too short."
        if bias.along is not None and bias.along.value is not None
        else ""
    )
    return (
        f"Averaged over {count(bias.steps, 'deep step')}, {estimate(bias.size)} of the difference between what was "
        f"accumulated and the live path stays (bias{score}){noise}.{along}{where}"
    )


def _gradient_table(record: StepRecord, last: GradientRecord) -> Table:
    sides = f"{path_label(last.candidate or 'candidate')} / {path_label(last.reference or 'reference')}"
    rows = [[f"Norm, {path_label(name)}", estimate(norm)] for name, norm in last.norms.items()]
    rows += [
        [f"Norm ratio, {sides}", estimate(last.norm_ratio)],
        ["Cosine", estimate(last.cosine)],
        ["Difference, relative to the reference", estimate(last.difference)],
        ["What the trainer accumulated against the live path, relative", estimate(last.accumulated)],
    ]
    return Table(f"The last deep step ({record.step:,}); ± one standard error", ["Figure", "Value"], rows, {1})


def _module_table(record: StepRecord, last: GradientRecord) -> list[Table]:
    if not last.modules:
        return []
    rows = [
        [clean(m.name), number(m.candidate), number(m.reference), number(m.cosine, 4),
         UNAVAILABLE if m.share is None else percent(m.share)]
        for m in last.modules[:SHOWN_MODULES]
    ]  # fmt: skip
    columns = ["Module", "Norm, candidate", "Norm, reference", "Cosine", "Share of the difference"]
    return [
        Table(f"Modules with the largest share of the difference (step {record.step:,})", columns, rows, {1, 2, 3, 4})
    ]
