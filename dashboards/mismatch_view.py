"""The part of the report on sampling drift. There is one only where a run has records of it, or a reason for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from driftscope._verdict_engine import canary_words, gather_engine, sampling_line
from driftscope.dashboards import figures, mismatch_tables
from driftscope.dashboards.series import whole_of, why_unavailable
from driftscope.dashboards.tables import Table
from driftscope.dashboards.wording import clean
from driftscope.records import AlertRecord, StepRecord


@dataclass(frozen=True)
class DriftSection:
    """Sentences, figures by width, tables; each list holds only what there is."""

    sentences: list[str] = field(default_factory=list)
    wide: list[figures.Panel] = field(default_factory=list)
    pairs: list[figures.Panel] = field(default_factory=list)
    watched: list[figures.Panel] = field(default_factory=list)
    looks: Table | None = None
    limits: Table | None = None
    numbers: Table | None = None

    @property
    def panels(self) -> list[figures.Panel]:
        """Every figure, in the order of the page."""
        return [*self.wide, *self.pairs, *self.watched]


def drift_section(steps: Sequence[StepRecord], alerts: Sequence[AlertRecord] = ()) -> DriftSection | None:
    """What the report says of sampling drift, or ``None`` where the run knows nothing of it."""
    looked = any(s.canary is not None for s in steps)
    section = DriftSection(
        sentences=_sentences(steps),
        wide=_there(steps, [(figures.mismatch_causes(steps), "canary")] if looked else []),
        pairs=_there(
            steps,
            [
                (figures.canary(steps), "canary"),
                (figures.mismatch_distribution(steps), "mismatch"),
                (figures.by_probability(steps), "mismatch"),
                (figures.by_position(steps), "mismatch"),
                (figures.by_progress(steps), "mismatch"),
            ],
        ),
        watched=_there(steps, [(figures.drift(steps, alerts), "drift")]),
        looks=mismatch_tables.canary_table(steps),
        limits=mismatch_tables.limit_table(steps),
        numbers=mismatch_tables.figure_table(steps),
    )
    return section if section.panels or section.looks or section.limits or section.numbers else None


def _there(steps: Sequence[StepRecord], group: Sequence[tuple[figures.Panel, str]]) -> list[figures.Panel]:
    """The figures that have data, and one of those for which a reason was recorded; the others have no place."""
    out, told = [], set()
    for panel, signal in group:
        if panel.figure is not None:
            out.append(panel)
        elif signal not in told and why_unavailable(steps, signal) is not None:
            told.add(signal)
            out.append(panel)
    return out


def _sentences(steps: Sequence[StepRecord]) -> list[str]:
    whole = whole_of(steps)
    engine = gather_engine(steps) if whole is None else whole.whole.engine.engine()
    line = sampling_line(engine)
    if engine is None:
        return []
    return [clean(canary_words(engine)), *([clean(f"At the last look: {line}.")] if line else [])]
