"""A run in a few medians: what the verdict talks about. Gathered record by record, in memory that does not grow."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from driftscope._verdict_engine import Engine, EngineTally
from driftscope.reading.digest import Digest
from driftscope.reading.events import log_size
from driftscope.records import StepRecord
from driftscope.rules.base import finite, hidden_ratio

Json = dict[str, Any]
NOT_READ = {"scatter": True, "mismatch": True, "drift": True, "profile": True, "head": True, "gradient": True,
            "ranks": True, "violations": True}  # fmt: skip
MAX_SIDES = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Medians over the analysed micro-batches; ``None`` is unavailable.

    gap: gradient norm, candidate / reference. worst_gap: the one furthest from 1. causes: id -> (median share, median
    factor), largest share first. length: completion tokens of a sequence that are trained on.
    """

    records: int
    first_step: int
    last_step: int
    live: str
    live_head: str | None
    candidate: str | None
    reference: str | None
    gap: float | None
    worst_gap: float | None
    param_gap: float | None
    cosine: float | None
    norms: dict[str, float] = field(default_factory=dict)
    coef_errors: dict[str, float] = field(default_factory=dict)
    causes: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    unexplained: float | None = None
    residual: float | None = None
    ratio_mode: str | None = None
    ratio_level: str | None = None
    ratio_mean: float | None = None
    ratio_applied: bool = False
    kept_mass: float | None = None
    length: float | None = None
    engine: Engine | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def shadow(self) -> bool:
        """Whether the candidate is not what trains."""
        return self.candidate is not None and self.candidate != self.live


@dataclass
class _Compared:
    """What is gathered over the records that compare the same two paths."""

    records: int = 0
    gaps: Digest = field(default_factory=Digest)
    worst: float | None = None
    attributed: int = 0
    """Records whose gap is known: those that a cause can have a share of."""
    param_gaps: Digest = field(default_factory=Digest)
    cosines: Digest = field(default_factory=Digest)
    unexplained: Digest = field(default_factory=Digest)
    shares: dict[str, Digest] = field(default_factory=dict)
    factors: dict[str, Digest] = field(default_factory=dict)

    def add(self, record: Json, gap: Json) -> None:
        self.records += 1
        self.param_gaps.add_finite(gap.get("param_grad_norm_ratio"))
        self.cosines.add_finite(gap.get("cosine"))
        left = record.get("unexplained")
        self.unexplained.add_finite(left["share"] if left is not None else None)
        ratio = ratio_of(record, gap)
        if ratio is None:
            return
        self.attributed += 1
        if ratio >= 0:
            self.gaps.add(ratio)
            self._furthest(ratio)
        seen = set()
        for cause in record.get("causes") or ():
            name = cause["id"]
            if name in seen or (name not in self.shares and len(self.shares) >= MAX_SIDES):
                continue
            seen.add(name)
            if name not in self.shares:
                self.shares[name], self.factors[name] = Digest(), Digest()
            self.shares[name].add(cause["share"])
            self.factors[name].add_finite(cause.get("factor"))

    def _furthest(self, ratio: float) -> None:
        if self.worst is None or log_size(ratio) > log_size(self.worst):
            self.worst = ratio

    def merge(self, other: _Compared) -> None:
        self.records += other.records
        self.attributed += other.attributed
        if other.worst is not None:
            self._furthest(other.worst)
        for name in ("gaps", "param_gaps", "cosines", "unexplained"):
            getattr(self, name).merge(getattr(other, name))
        for mine, theirs in ((self.shares, other.shares), (self.factors, other.factors)):
            for name, digest in theirs.items():
                mine.setdefault(name, Digest()).merge(digest)

    def causes(self) -> dict[str, tuple[float, float | None]]:
        """Median share (zero where a record does not name the cause) and median factor, largest share first."""
        out = {}
        for name, named in self.shares.items():
            shares = Digest()
            shares.merge(named)
            shares.repeat(0.0, self.attributed - named.count)
            out[name] = (shares.median() or 0.0, self.factors[name].median())
        return dict(sorted(out.items(), key=lambda item: (-item[1][0], item[0])))


@dataclass
class FactsTally:
    """The facts so far, from records as plain JSON objects in file order."""

    records: int = 0
    first_step: int = 0
    last_step: int = 0
    live: Counter[str] = field(default_factory=Counter)
    live_head: str | None = None
    sides: dict[tuple[str, str], _Compared] = field(default_factory=dict)
    norms: dict[str, Digest] = field(default_factory=dict)
    coef_errors: dict[str, Digest] = field(default_factory=dict)
    residual: Digest = field(default_factory=Digest)
    ratio_mode: str | None = None
    ratio_level: str | None = None
    ratio_mean: Digest = field(default_factory=Digest)
    ratio_applied: bool = False
    kept_mass: Digest = field(default_factory=Digest)
    length: Digest = field(default_factory=Digest)
    engine: EngineTally = field(default_factory=EngineTally)
    unavailable: dict[str, str] = field(default_factory=dict)

    def add(self, record: Json) -> None:
        """Take in one record, if something was measured in it."""
        if record.get("tier", "spectrum") == "light" or not _measured(record):
            return
        step = record["step"]
        self.first_step = min(self.first_step, step) if self.records else step
        self.last_step = max(self.last_step, step) if self.records else step
        self.records += 1
        self.live[record["live"]] += 1
        self.live_head = record.get("live_head") or self.live_head
        for name, path in record["paths"].items() if record.get("paths") else ():
            _put_named(self.norms, name, path.get("hidden_grad_norm"))
            _put_named(self.coef_errors, name, path.get("coef_error"))
        self.residual.add_finite(record.get("residual"))
        gap = record.get("gap")
        if gap is not None:
            sides = (gap["candidate"], gap["reference"])
            compared = self.sides.get(sides)
            if compared is None and len(self.sides) < MAX_SIDES:
                compared = self.sides[sides] = _Compared()
            if compared is not None:
                compared.add(record, gap)
        if record.get("is_ratio") is not None:
            self._add_ratio(record, record["is_ratio"])
        self.engine.add(record)
        if record.get("unavailable"):
            self.unavailable |= record["unavailable"]

    def _add_ratio(self, record: Json, ratio: Json) -> None:
        applied, raw = ratio.get("applied"), ratio.get("raw")
        self.ratio_mode = self.ratio_mode or ratio.get("mode") or None
        stats = applied or raw
        if self.ratio_level is None and stats is not None:
            self.ratio_level = stats["level"]
        self.ratio_applied = self.ratio_applied or applied is not None
        self.ratio_mean.add_finite(applied_mean(ratio))
        self.kept_mass.add_finite(ratio.get("kept_mass"))
        stats, tokens = raw or applied, record.get("tokens")
        if stats is not None and stats["level"] == "sequence" and stats["count"] and tokens is not None:
            with contextlib.suppress(OverflowError):  # a damaged file may hold an integer of any size
                self.length.add_finite(tokens / stats["count"])

    def merge(self, other: FactsTally) -> None:
        """Take in a later part of the run."""
        if not other.records:
            return
        self.first_step = min(self.first_step, other.first_step) if self.records else other.first_step
        self.last_step = max(self.last_step, other.last_step) if self.records else other.last_step
        self.records += other.records
        self.live.update(other.live)
        self.live_head = other.live_head or self.live_head
        for sides, compared in other.sides.items():
            self.sides.setdefault(sides, _Compared()).merge(compared)
        for mine, theirs in ((self.norms, other.norms), (self.coef_errors, other.coef_errors)):
            for name, digest in theirs.items():
                mine.setdefault(name, Digest()).merge(digest)
        for name in ("residual", "ratio_mean", "kept_mass", "length", "engine"):
            getattr(self, name).merge(getattr(other, name))
        self.ratio_mode = self.ratio_mode or other.ratio_mode
        self.ratio_level = self.ratio_level or other.ratio_level
        self.ratio_applied = self.ratio_applied or other.ratio_applied
        self.unavailable |= other.unavailable

    def facts(self) -> Facts | None:
        """The facts, or ``None`` where nothing was measured."""
        if not self.records:
            return None
        sides, compared = (None, None), _Compared()
        if self.sides:
            sides, compared = max(self.sides.items(), key=lambda item: item[1].records)  # type: ignore[assignment]
        return Facts(
            records=self.records,
            first_step=self.first_step,
            last_step=self.last_step,
            live=self.live.most_common(1)[0][0],
            live_head=self.live_head,
            candidate=sides[0],
            reference=sides[1],
            gap=compared.gaps.median(),
            worst_gap=compared.worst,
            param_gap=compared.param_gaps.median(),
            cosine=compared.cosines.median(),
            norms=_medians(self.norms),
            coef_errors=_medians(self.coef_errors),
            causes=compared.causes(),
            unexplained=compared.unexplained.median(),
            residual=self.residual.median(),
            ratio_mode=self.ratio_mode,
            ratio_level=self.ratio_level,
            ratio_mean=self.ratio_mean.median(),
            ratio_applied=self.ratio_applied,
            kept_mass=self.kept_mass.median(),
            length=self.length.median(),
            engine=self.engine.engine(),
            unavailable=dict(self.unavailable),
        )


def as_json(record: StepRecord) -> Json:
    """What the facts are gathered from, of a record that is already in memory."""
    return record.model_dump(by_alias=True, warnings=False, exclude=NOT_READ)


def gather(steps: Iterable[StepRecord]) -> Facts | None:
    """The facts of a run, or ``None`` where nothing was measured."""
    tally = FactsTally()
    for record in steps:
        tally.add(as_json(record))
    return tally.facts()


def applied_mean(ratio: Json) -> float | None:
    """Mean of the ratio as the loss applies it, else of the raw one: ``driftscope.rules`` has it for a record."""
    for stats in (ratio.get("applied"), ratio.get("raw")):
        if stats is not None and (mean := finite(stats.get("mean"))) is not None:
            return mean
    return None


def ratio_of(record: Json, gap: Json) -> float | None:
    """``driftscope.rules.base.hidden_ratio`` of a record as a JSON object."""
    known = finite(gap.get("grad_norm_ratio"))
    if known is not None:
        return known
    needed = {name: record.get(name) for name in ("step", "micro_step", "live", "gap")}
    return hidden_ratio(StepRecord.model_validate({**needed, "paths": record.get("paths") or {}}))


def _measured(record: Json) -> bool:
    """Whether at least one path's gradient, or the residual of the live one, was measured."""
    if finite(record.get("residual")) is not None:
        return True
    paths = record.get("paths") or {}
    return any(finite(p.get("hidden_grad_norm")) is not None for p in paths.values())


def _put_named(digests: dict[str, Digest], name: str, value: float | None) -> None:
    digest = digests.get(name)
    if digest is None:
        if len(digests) >= MAX_SIDES:
            return
        digest = digests[name] = Digest()
    digest.add_finite(value)


def _medians(digests: dict[str, Digest]) -> dict[str, float]:
    found = {name: digests[name].median() for name in sorted(digests)}
    return {name: value for name, value in found.items() if value is not None}
