"""DS211: a watched series drifts: a spike, a level shift, a slow trend, a bias of the mean."""

from __future__ import annotations

import math

from driftscope._text import sig, times
from driftscope.records import DriftRecord, Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds, finite

WORDS = {
    "log_is_mean": "the mean importance sampling ratio of a token",
    "log_is_std": "the spread of the importance sampling ratio of a token",
    "log_gap": "the gradient norm ratio of candidate and reference",
}
WHAT = {"spike": "jumps for a step", "shift": "has moved", "trend": "moves slowly", "bias": "is off its target"}


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires at the step at which a detector tells of a new episode; the largest deviation where there are several."""
    fresh = {name: seen for name, seen in record.drift.items() if seen.fresh and _size(seen) is not None}
    if not fresh:
        return None
    name, seen = max(fresh.items(), key=lambda item: abs(_size(item[1]) or 0.0))
    size = _size(seen) or 0.0
    severity: Severity = "info" if seen.kind == "spike" else "warning"
    if abs(size) >= math.log(thresholds.gap_critical):
        severity = "critical"
    parts = [f"{_listed(n, s)}" for n, s in fresh.items()]
    title = f"{WORDS.get(name, name)} {WHAT.get(seen.kind or '', 'drifts')}"
    return Finding(severity, title[:1].upper() + title[1:], "; ".join(parts), RULE.remedy)


def _size(seen: DriftRecord) -> float | None:
    """Deviation of the level from the baseline, in logs."""
    level, baseline = finite(seen.level), finite(seen.baseline)
    return level - baseline if level is not None and baseline is not None else None


def _listed(name: str, seen: DriftRecord) -> str:
    level, baseline, size = finite(seen.level) or 0.0, finite(seen.baseline) or 0.0, _size(seen) or 0.0
    since = f" since about step {seen.started}" if seen.started is not None else ""
    score = f", {sig(seen.score)} standard errors" if finite(seen.score) is not None else ""
    return (
        f"{name}: {seen.kind}{since}, from {sig(math.exp(min(baseline, 700.0)))} to "
        f"{sig(math.exp(min(level, 700.0)))} ({times(math.exp(min(size, 700.0)))}{score})"
    )


RULE = Rule(
    code="DS211",
    name="drift",
    title="A watched series drifts",
    group="sampling",
    why=(
        "A mismatch that grows is a fault on its way: an engine that stopped following the weights, a policy that "
        "leaves the range in which the engine's number format is exact, a reward that lengthens the completions. Each "
        "step alone looks like noise; the series does not."
    ),
    condition=(
        "A detector on one of the series log_is_mean, log_is_std, log_gap tells of a new episode: a spike (info), a "
        "level shift, a slow trend or a bias of the mean (warning); critical from a factor of gap_critical (10). "
        "Detectors learn level, scale and autocorrelation in a warm-up, and nothing within noise_multiple (3) times "
        "the measured noise floor alarms."
    ),
    remedy=(
        "Look at the canary's verdict and the causes of the ratio at the step where it began: they say whether "
        "weights, sampling settings or number formats changed. Without a cause, compare completions and learning "
        "rate around that step, and score the same tokens twice to see the noise."
    ),
    check=check,
)
