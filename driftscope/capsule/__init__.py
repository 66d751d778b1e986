"""The replay capsule: one analysed micro-batch on disk, from which its record and findings can be computed again.

    capsule = read_capsule(Path("runs/mine/capsules/step-000007"))
    replayed = replay(capsule)          # without the model, a trainer or TRL

``format`` writes and reads, ``checks`` refuses what is damaged, ``headpass`` and ``recompute`` compute, ``figures``
says how far the two sets of numbers are apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

if TYPE_CHECKING:
    from driftscope.capsule.format import Capsule, read_capsule, write_capsule
    from driftscope.capsule.recompute import Replay, replay

_HOME = {
    "Capsule": "driftscope.capsule.format",
    "Replay": "driftscope.capsule.recompute",
    "read_capsule": "driftscope.capsule.format",
    "replay": "driftscope.capsule.recompute",
    "write_capsule": "driftscope.capsule.format",
}

__all__ = ["Capsule", "Replay", "read_capsule", "replay", "write_capsule"]
__getattr__, __dir__ = lazy_names(globals(), _HOME)
