"""Step records as a live run would write them, with the fields that a test wants changed."""

from __future__ import annotations

from driftscope.records import (
    AlertRecord,
    Cause,
    Gap,
    IsRatio,
    NoteRecord,
    PathRecord,
    RatioStats,
    RunInfo,
    StepRecord,
    Unexplained,
)

NOISE = 4e-7


def step(
    *,
    ratio=1.0,
    live="liger",
    candidate="liger",
    reference="reference",
    cosine=1.0,
    noise=NOISE,
    causes=(),
    left=0.0,
    **fields,
):
    """One analysed micro-batch whose candidate has ``ratio`` times the reference's hidden gradient norm.

    causes: (id, share, factor) each. left: the unexplained share.
    """
    paths = {
        candidate: PathRecord(loss=0.1, hidden_grad_norm=0.02 * ratio, normalizer=100.0, coef_error=abs(ratio - 1)),
        reference: PathRecord(loss=0.1, hidden_grad_norm=0.02, normalizer=100.0, coef_error=1e-8),
        "oracle": PathRecord(loss=0.1, hidden_grad_norm=0.02, normalizer=100.0, source="spec"),
    }
    values = {
        "step": 1,
        "micro_step": 0,
        "live": live,
        "paths": paths,
        "gap": Gap(candidate=candidate, reference=reference, grad_norm_ratio=ratio, cosine=cosine, noise_floor=noise),
        "causes": [Cause(id=name, share=share, factor=factor) for name, share, factor in causes],
        "unexplained": Unexplained(share=left, factor=1.0),
        "residual": 3e-7,
        "tokens": 96,
        "completion_tokens": 96,
        "zero_advantage_share": 0.0,
    }
    return StepRecord(**{**values, **fields})


def stats(mean, *, level="sequence", count=4, **fields):
    """A distribution of ratios with that mean."""
    return RatioStats(level=level, count=count, **{"mean": mean, "ess": 0.9, **fields})


def honest_ratio():
    """A ratio of 1 with nothing truncated."""
    return IsRatio(
        mode="sequence_mask", cap=3.0, raw=stats(1.0), raw_token=stats(1.0, level="token"), applied=stats(1.0),
        kept_mass=1.0,
    )  # fmt: skip


def truncated_ratio(kept=0.81, mean=0.0063, mode="sequence_mask"):
    """A ratio that top_p has shrunk."""
    level = mode.split("_")[0]
    return IsRatio(
        mode=mode, cap=3.0, raw=stats(mean, level=level), raw_token=stats(kept, level="token"),
        applied=stats(mean, level=level), kept_mass=kept, truncated_support_share=0.99,
    )  # fmt: skip


def seed_step(number=1, **fields):
    """The broken run: Liger trains, drops the correction, and the correction is itself biased."""
    return step(
        **{
            "step": number,
            "ratio": 118.0,
            "cosine": 0.8,
            "causes": [("is_correction", 0.94, 88.0), ("normalizer", 0.06, 1.34)],
            "is_ratio": truncated_ratio(),
            **fields,
        }
    )


def info(**fields):
    """The run.json of a run."""
    return RunInfo(**{"run_id": "abc", "created": 1.0, "driftscope": "0.1.0", **fields})


def alert(rule="DS101", severity="critical", number=1, **fields):
    """An alert on record."""
    values = {"title": "T", "evidence": "E", "remedy": "R"}
    return AlertRecord(step=number, rule=rule, severity=severity, **{**values, **fields})


def note(message="ValueError: on purpose", number=3, stage="shadow"):
    """A note that a stage failed."""
    return NoteRecord(step=number, stage=stage, message=message)
