"""Profiles by name, from a mapping, and from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from driftscope.errors import UsageError
from driftscope.profiles.builtin import PROFILES
from driftscope.profiles.profile import Profile, require_known


def load_profile(source: str | Path | Mapping[str, Any]) -> Profile:
    """A profile by its name (strict, verl, nemo, trl), from a JSON file, or from a mapping.

    ``base`` names a profile that the other fields change. Raises ``UsageError`` for a file that cannot be read, an
    unknown field or profile (the nearest is named), or a value outside its domain.
    """
    if isinstance(source, str) and source in PROFILES:
        return PROFILES[source]
    if isinstance(source, str | Path):
        return _from_mapping(_read(Path(source)), str(source))
    return _from_mapping(source, "the profile")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        require_known(str(path), PROFILES, "The list of threshold profiles")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"The threshold profile {path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f'The threshold profile {path} holds no JSON object: write {{"base": "verl", ...}}.')
    return data


def _from_mapping(data: Mapping[str, Any], where: str) -> Profile:
    known = {f.name: f for f in fields(Profile)}
    for name in data:
        require_known(str(name), {"base": None, **known}, where)
    base = data.get("base")
    if base is not None:
        require_known(str(base), PROFILES, "The list of threshold profiles")
    start = PROFILES[str(base)] if base is not None else Profile()
    given = {name: value for name, value in data.items() if name != "base"}
    changed = {name: source for name, source in start.sources.items() if name not in given}
    return replace(start, **{"name": "custom", "sources": changed, **given})


def profile_dict(profile: Profile) -> dict[str, Any]:
    """The profile as JSON types; ``load_profile`` reads it back."""
    return {name: value for name, value in asdict(profile).items() if value is not None}
