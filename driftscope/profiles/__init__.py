"""Threshold profiles: which mismatch is too much, after whom, and never closer than what the hardware cannot help.

    violations(mismatch, VERL, noise_floor)
    violations(mismatch, load_profile("mine.json"), noise_floor)      # {"base": "verl", "ess_low": 0.5}

**The noise rule.** Every figure has a value that two identical policies give (``Check.ideal``): 1 for a mean ratio and
for the effective sample size, 0 for a divergence. A limit stands at a distance from it. The noise floor, the same
tokens scored twice on the same weights, has a distance too. The limit that is applied is the farther of the two:

    distance = max(|limit - ideal|, noise_multiple * distance of the noise floor)

with distances of ratios measured in their logs. The floor's distance is what was measured, or what independent normal
noise of the floor's spread would give on as many tokens and sequences, if that is more: one scoring's mean can be near
the ideal by luck, and the sequence product's even more so. So a floor only ever widens a limit, and a small one leaves
it alone. A limit pushed out of the figure's range (an effective sample size under 0) cannot be crossed any more.
"""

from __future__ import annotations

from driftscope.profiles.builtin import NEMO, PROFILES, STRICT, TRL, VERL
from driftscope.profiles.checks import CHECKS, Check
from driftscope.profiles.judge import Violation, unchecked, violations
from driftscope.profiles.loading import load_profile, profile_dict
from driftscope.profiles.profile import Profile

__all__ = [
    "CHECKS",
    "NEMO",
    "PROFILES",
    "STRICT",
    "TRL",
    "VERL",
    "Check",
    "Profile",
    "Violation",
    "load_profile",
    "profile_dict",
    "unchecked",
    "violations",
]
