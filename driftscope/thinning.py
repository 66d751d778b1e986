"""What a long run writes: everything at first, later every tenth analysed step in full and the others without detail.

A journal of a million optimizer steps stays readable in seconds only where it is not mostly scatter points. No figure
that a rule or a trend is based on is ever left out, and what is left out is unavailable in that record, not zero.
"""

from __future__ import annotations

from typing import Any

from driftscope.mismatch.model import Mismatch
from driftscope.records import IsRatio, StepRecord

FULL_UNTIL = 100
"""Steps of a tier that are written in full from the beginning of the run."""
FULL_EVERY = 10
"""Of later ones every n-th is."""
DIGITS = 9
"""Significant digits of the later figures: a little more than single precision holds."""

_KEPT_EMPTY = frozenset({"gap", "causes", "unexplained", "residual", "is_ratio", "live_grad_norm"})
_KEPT_OF_PATH = frozenset({"loss", "hidden_grad_norm", "param_grad_norm", "normalizer", "coef_error"})
_WHOLE = frozenset({"time", "unavailable", "nonfinite", "head"})  # copied as they are


def in_full(index: int, fresh_alarm: bool) -> bool:
    """Whether the ``index``-th (from 0) step of its tier is written with every detail."""
    return fresh_alarm or index < FULL_UNTIL or index % FULL_EVERY == 0


def thin(record: StepRecord, index: int, fresh_alarm: bool) -> StepRecord:
    """A record as it is written: itself, or without its details.

    index: which step of its tier it belongs to, from 0: light ones are counted apart from analysed ones.
    fresh_alarm: whether an alarm is told at this step that was not told at the one before.

    Left out are the scatter, the quantiles of the ratios, the mismatch by bins, and the mismatch of micro-batches
    other than the last of the window.
    """
    if in_full(index, fresh_alarm):
        return record
    return record.model_copy(
        update={
            "scatter": [],
            "is_ratio": _without_quantiles(record.is_ratio) if record.is_ratio is not None else None,
            "mismatch": _without_bins(record.mismatch) if record.mismatch is not None and _is_last(record) else None,
        }
    )


class Thinner:
    """What a writer asks of every step record: ``slim(record, encode(thin(record)))`` is what goes into the journal.

    It counts the steps by itself, from the beginning of the process: a resumed run starts in full again.
    """

    def __init__(self) -> None:
        self._index = {"light": -1, "analysed": -1}
        self._step: dict[str, int | None] = {"light": None, "analysed": None}

    def thin(self, record: StepRecord, fresh_alarm: bool = False) -> StepRecord:
        """The record as it is written; see ``thin``."""
        return thin(record, self._count(record), fresh_alarm)

    def slim(self, record: StepRecord, data: dict[str, Any]) -> dict[str, Any]:
        """Its encoded form: light records without nulls, later ones also with rounded figures."""
        early = self._index[_sort(record)] < FULL_UNTIL
        return data if early and record.tier != "light" else slim(data, exact=early)

    def _count(self, record: StepRecord) -> int:
        sort = _sort(record)
        if record.step != self._step[sort]:
            self._step[sort] = record.step
            self._index[sort] += 1
        return self._index[sort]


def _sort(record: StepRecord) -> str:
    return "light" if record.tier == "light" else "analysed"


def slim(data: dict[str, Any], *, exact: bool = False) -> dict[str, Any]:
    """An encoded step record without its nulls and empty fields, which a reader takes for granted.

    The fields that ``docs/records.md`` promises stay. Figures keep ``DIGITS`` significant digits unless ``exact``.
    """
    digits = None if exact else DIGITS
    out: dict[str, Any] = {}
    for name, value in data.items():
        if name == "paths":
            out[name] = {path: _slim_path(fields, digits) for path, fields in value.items()}
        elif name in _WHOLE:
            if value:
                out[name] = round(value, 3) if name == "time" and digits is not None else value
        elif name in _KEPT_EMPTY:
            out[name] = _slim(value, digits)
        elif not _empty(found := _slim(value, digits)):
            out[name] = found
    return out


def _slim_path(fields: dict[str, Any], digits: int | None) -> dict[str, Any]:
    return {k: _slim(v, digits) for k, v in fields.items() if v is not None or k in _KEPT_OF_PATH}


def _slim(value: Any, digits: int | None) -> Any:
    if type(value) is float:
        return float(f"{value:.{digits}g}") if digits is not None else value
    if type(value) is dict:
        return {k: found for k, v in value.items() if not _empty(found := _slim(v, digits))}
    if type(value) is list:
        return [_slim(v, digits) for v in value]
    return value


def _empty(value: Any) -> bool:
    return value is None or value == {} or value == []


def _is_last(record: StepRecord) -> bool:
    return record.accumulation is None or record.micro_step == record.accumulation - 1


def _without_quantiles(ratio: IsRatio) -> IsRatio:
    held = {name: getattr(ratio, name) for name in ("raw", "raw_token", "applied")}
    return ratio.model_copy(
        update={k: stats.model_copy(update={"quantiles": {}}) for k, stats in held.items() if stats is not None}
    )


def _without_bins(mismatch: Mismatch) -> Mismatch:
    return mismatch.model_copy(update={name: [] for name in ("by_probability", "by_decile", "by_octave", "histogram")})
