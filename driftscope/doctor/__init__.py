"""What goes wrong, found before the run: measured facts of a stack, a model and a configuration, judged by the rules.

The facts are gathered in ``driftscope.hooks.doctor``, where TRL is; here they are data.
"""

from __future__ import annotations

from driftscope.doctor.facts import (
    Facts,
    FeatureRow,
    FlowFix,
    GradientFlow,
    ModelFacts,
    RewardFacts,
    Settings,
    StackTable,
)
from driftscope.doctor.foresee import Diagnosis, chosen_rules, foresee

__all__ = [
    "Diagnosis",
    "Facts",
    "FeatureRow",
    "FlowFix",
    "GradientFlow",
    "ModelFacts",
    "RewardFacts",
    "Settings",
    "StackTable",
    "chosen_rules",
    "foresee",
]
