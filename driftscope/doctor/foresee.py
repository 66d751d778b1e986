"""The rules on the facts: what will go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from driftscope.doctor.facts import Facts
from driftscope.errors import UsageError
from driftscope.records import SEVERITIES
from driftscope.rules.base import Finding, Rule, Thresholds
from driftscope.rules.registry import registry


@dataclass(frozen=True)
class Diagnosis(Sequence[Finding]):
    """The findings, worst first, and the facts behind them. A sequence of findings."""

    findings: tuple[Finding, ...]
    facts: Facts
    failed: dict[str, str] = field(default_factory=dict)
    """Rules that could not judge -> why."""

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    @property
    def rules(self) -> tuple[str, ...]:
        """The codes that were found, worst first."""
        return tuple(finding.rule for finding in self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return "driftscope doctor: nothing found"
        return "\n".join(
            f"{f.severity.upper()} {f.rule} {f.title}\n  evidence: {f.evidence}\n  remedy: {f.remedy}"
            for f in self.findings
        )


def foresee(facts: Facts, thresholds: Thresholds | None = None, rules: Iterable[Rule] | None = None) -> Diagnosis:
    """Judge the facts by the rules that can (all of them by default); worst first, then by code.

    A rule that raises does not silence the others; it is listed in ``failed``.
    """
    limits = thresholds or Thresholds()
    found: list[Finding] = []
    failed: dict[str, str] = {}
    for rule in registry() if rules is None else rules:
        if rule.predict is None:
            continue
        try:
            finding = rule.predict(facts, limits)
        except Exception as error:  # noqa: BLE001 - one rule, perhaps of a third party
            failed[rule.code] = f"{type(error).__name__}: {error}"
            continue
        if finding is not None:
            found.append(dataclasses.replace(finding, rule=rule.code))
    found.sort(key=lambda f: (-SEVERITIES.index(f.severity), f.rule))
    return Diagnosis(tuple(found), facts, failed)


def chosen_rules(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Rule, ...]:
    """The rules whose code starts with one of ``select`` (all without it) and with none of ``ignore``.

    Raises ``UsageError`` for a code or group that no rule has.
    """
    every = registry()
    for given in (*select, *ignore):
        if not given or not any(rule.code.startswith(given) for rule in every):
            raise UsageError(
                f"{given!r} is no rule or group; use a code such as DS301 or a group such as DS3. Known: "
                f"{', '.join(rule.code for rule in every)}."
            )
    kept = [rule for rule in every if not select or rule.code.startswith(tuple(select))]
    return tuple(rule for rule in kept if not (ignore and rule.code.startswith(tuple(ignore))))
