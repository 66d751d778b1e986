"""All rules, those of other packages included, and their evaluation on a step."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache

from driftscope.records import AlertRecord, StepRecord
from driftscope.rules.base import Rule, Thresholds

ENTRY_POINTS = "driftscope.rules"
"""Group of entry points under which another package registers a ``Rule``."""
_MODULE = re.compile(r"ds\d{3}_\w+")
_CODE = re.compile(r"[A-Z]{2,8}\d{3,4}")


def registry() -> tuple[Rule, ...]:
    """All rules, ordered by code: one from each ``ds<number>_<name>`` module, and those of entry points.

    An entry point that fails to load, is no ``Rule``, or takes a code that is in use or not of the form ``ABC123`` is
    left out with a warning.
    """
    return _all_rules()


@lru_cache(maxsize=1)
def _all_rules() -> tuple[Rule, ...]:
    package = importlib.import_module("driftscope.rules")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if _MODULE.fullmatch(m.name))
    rules: dict[str, Rule] = {}
    for name in names:
        rule: Rule = importlib.import_module(f"driftscope.rules.{name}").RULE
        rules[rule.code] = rule
    for rule in _third_parties(frozenset(rules)):
        rules[rule.code] = rule
    return tuple(rules[code] for code in sorted(rules))


def _third_parties(taken: frozenset[str]) -> Iterator[Rule]:
    """The rules that other packages registered."""
    used = set(taken)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            rule = point.load()
            why = _unusable(rule, used)
        except Exception as error:  # noqa: BLE001 - another package's code must not take ours down
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            warnings.warn(
                f"driftscope: rule {point.name!r} ({point.value}) is left out: {why}", RuntimeWarning, stacklevel=2
            )
            continue
        used.add(rule.code)
        yield rule


def _unusable(rule: object, used: set[str]) -> str | None:
    """Why an object cannot be a registered rule, or ``None``."""
    if not isinstance(rule, Rule):
        return f"it is a {type(rule).__name__}, not a driftscope.rules.Rule"
    if not _CODE.fullmatch(rule.code):
        return f"its code {rule.code!r} is not of the form ABC123"
    if rule.code in used:
        return f"its code {rule.code} is in use"
    return None


def evaluate(
    record: StepRecord,
    thresholds: Thresholds | None = None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> list[AlertRecord]:
    """The findings of every rule on one step, ordered by code.

    on_error: told the code and the exception of a rule that fails, so that the others still speak; without it the
    exception is raised.
    """
    limits = thresholds or Thresholds()
    alerts = []
    for rule in registry():
        if rule.check is None:
            continue
        try:
            finding = rule.check(record, limits)
        except Exception as error:
            if on_error is None:
                raise
            on_error(rule.code, error)
            continue
        if finding is not None:
            alerts.append(
                AlertRecord(
                    time=record.time,
                    step=record.step,
                    rank=record.rank,
                    rule=rule.code,
                    severity=finding.severity,
                    title=finding.title,
                    evidence=finding.evidence,
                    remedy=finding.remedy,
                )
            )
    return alerts
