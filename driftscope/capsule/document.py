"""A replay as plain JSON: what ``driftscope replay --json`` prints and what its page is made of. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from driftscope._jsonable import to_jsonable
from driftscope.journal import encode

if TYPE_CHECKING:
    from driftscope.capsule.format import Capsule
    from driftscope.capsule.recompute import Replay
    from driftscope.verdict import Verdict

SHOWN = 12


def as_document(
    capsule: Capsule, replayed: Replay, verdict: Verdict, *, fail_on: str, exit_code: int
) -> dict[str, Any]:
    """The replay as one JSON object. Figures: every one that differs, and the ``SHOWN`` that are furthest apart."""
    order = sorted(replayed.figures, key=lambda f: (f.same, -((f.difference or 0.0) / f.allowed)))
    differing = [f for f in order if not f.same]
    shown = order[: max(SHOWN, len(differing))]
    rows = int(capsule.tensors["rows"].sum())
    hidden = capsule.tensors.get("hidden_rows")
    shapes = {k: f"{str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}" for k, v in capsule.tensors.items()}
    return to_jsonable(  # type: ignore[no-any-return]
        {
            "run_id": capsule.info.run_id if capsule.info is not None else None,
            "step": capsule.record.step,
            "micro_step": capsule.record.micro_step,
            "why": capsule.why,
            "same": replayed.same,
            **asdict(verdict),
            "how": replayed.how,
            "failed": replayed.failed,
            "figures": {
                "compared": len(replayed.figures),
                "differing": len(differing),
                "furthest": [{**asdict(f), "same": f.same} for f in shown],
            },
            "lost": replayed.lost,
            "new": replayed.new,
            "carried": [encode(alert) for alert in replayed.carried],
            "record": encode(replayed.record),
            "notes": capsule.notes,
            "tensors": {
                "rows": rows,
                "rows_with_hidden_states": 0 if hidden is None else hidden.numel(),
                "list": shapes,
                "bytes": sum(v.numel() * v.element_size() for v in capsule.tensors.values()),
            },
            "texts": capsule.texts is not None,
            "fail_on": fail_on,
            "exit_code": exit_code,
        }
    )[0]
