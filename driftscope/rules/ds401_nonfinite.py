"""DS401: a value is NaN or infinite."""

from __future__ import annotations

from driftscope._jsonable import to_jsonable
from driftscope._text import printable
from driftscope.records import Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite

BOOKKEEPING = ("time", "overhead_ms", "step_ms")
DERIVED = ("gap.", "causes.", "unexplained.")
DERIVED_ENDS = (".coef_error", ".normalizer_measured", ".fused_call_error")
MAX_NAMES = 8


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires where a value is named in ``nonfinite`` or is not finite in the record itself."""
    _, found = to_jsonable(record.model_dump(by_alias=True, warnings=False))
    names = [n for n in dict.fromkeys([*record.nonfinite, *found]) if n not in BOOKKEEPING]
    if _zero_norm(record):  # dividing by a gradient that is exactly zero is no numerical fault
        names = [n for n in names if not n.startswith(DERIVED) and not n.endswith(DERIVED_ENDS)]
    if not names:
        return None
    severity = max((_severity(name, record) for name in names), key=("info", "warning", "critical").index)
    where = {
        "critical": "in what trains",
        "warning": "in a comparison value",
        "info": f"on a path that does not train ({record.live} does)",
    }[severity]
    shown = ", ".join(printable(n) for n in names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return Finding(severity, f"A value is NaN or infinite {where}", f"not finite: {shown}{more}", RULE.remedy)


def _severity(name: str, record: StepRecord) -> Severity:
    if name.startswith("paths."):
        path = name.split(".")[1]
        if path == record.live:
            return "critical"
        return "info" if path == "liger" else "warning"
    if name.startswith("is_ratio."):
        return "critical" if name.startswith("is_ratio.applied.") else "warning"
    return "warning" if name.startswith((*DERIVED, "scatter.")) else "critical"


def _zero_norm(record: StepRecord) -> bool:
    """Whether a compared path has a gradient of exactly zero and all have finite ones."""
    norms = [path.hidden_grad_norm for path in record.paths.values()]
    return 0.0 in norms and all(finite(norm) is not None for norm in norms)


RULE = Rule(
    code="DS401",
    name="non-finite-value",
    title="A value is NaN or infinite",
    group="numerics",
    why=(
        "One NaN or infinity in a loss, log-prob, ratio or gradient spreads to every parameter that the optimiser "
        "updates. Sources are an exponential of a large log ratio, a division by a mask that sums to zero, an "
        "overflow in float16, or a reward that is not a number."
    ),
    condition=(
        "A value of the record is NaN or infinite (`nonfinite` names it). Critical if it belongs to what trains, "
        "warning for the reference, the oracle, a raw ratio or a derived value, info for a fused path that does not "
        "train."
    ),
    remedy=(
        "Stop and go back to a checkpoint from before this step. If a ratio is named, check the sampling log-probs "
        "(DS202) and the rewards; if a gradient is named, use bf16=True instead of fp16=True and check max_grad_norm."
    ),
    check=check,
)
