"""The rules: what a record must show for a finding, and what to do about it. One rule, one file."""

from __future__ import annotations

from driftscope.rules.base import Finding, Rule, Thresholds
from driftscope.rules.ds111_refused_options import refused_finding
from driftscope.rules.ds901_probe_failed import note_finding
from driftscope.rules.registry import evaluate, registry

__all__ = ["Finding", "Rule", "Thresholds", "evaluate", "note_finding", "refused_finding", "registry"]
