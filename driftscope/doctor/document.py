"""A diagnosis as the JSON object that ``driftscope doctor --json`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from driftscope._jsonable import to_jsonable
from driftscope.doctor.facts import Settings
from driftscope.doctor.foresee import Diagnosis

SCHEMA_VERSION = 1


def as_document(diagnosis: Diagnosis, **extra: Any) -> dict[str, Any]:
    """Findings, facts and what could not be had, in plain JSON types. ``extra``: further top-level fields."""
    facts = diagnosis.facts
    document = {
        "schema": SCHEMA_VERSION,
        "findings": [_plain(finding) for finding in diagnosis],
        "settings": _settings(facts.settings) if facts.settings is not None else None,
        "stack": _plain(facts.stack),
        "flow": _plain(facts.flow),
        "reward": _plain(facts.reward),
        "model": _plain(facts.model),
        "unavailable": dict(facts.unavailable),
        "failed_rules": dict(diagnosis.failed),
        **extra,
    }
    plain: dict[str, Any] = to_jsonable(document)[0]
    return plain


def _settings(settings: Settings) -> dict[str, Any]:
    """What was set; TRL's defaults are TRL's to list."""
    chosen = {name: settings.values.get(name) for name in sorted(settings.given)}
    return {"trainer": settings.trainer, "source": settings.source, "given": chosen, "refusal": settings.refusal}


def _plain(fact: Any) -> dict[str, Any] | None:
    if fact is None:
        return None
    return {f.name: _value(getattr(fact, f.name)) for f in dataclasses.fields(fact)}


def _value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(value)
    if isinstance(value, tuple | list | frozenset):
        return [_value(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
