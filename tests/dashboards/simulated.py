"""A small simulated run: 40 steps of 4 micro-batches, the applied ratio in 0.003-0.01, a gap of about 100x."""

from __future__ import annotations

import random

from driftscope.journal import Run
from driftscope.records import (
    AlertRecord,
    Cause,
    CoefPoint,
    Gap,
    IsRatio,
    NoteRecord,
    PathRecord,
    RatioStats,
    RunInfo,
    StepRecord,
    Unexplained,
)
from driftscope.verdict import Verdict
from tests.dashboards import simulated_mismatch

NO_VERDICT = Verdict(level="unavailable", headline="Nothing was measured", summary=[], first_action=None, findings=[])


def ratio_stats(rng: random.Random, center: float, spread: float, level: str = "sequence") -> RatioStats:
    draws = sorted(center * rng.lognormvariate(0, spread) for _ in range(200))
    quantiles = {f"p{q:02d}": draws[min(199, q * 2)] for q in (1, 5, 25, 50, 75, 95, 99)}
    mean = sum(draws) / 200
    return RatioStats(
        level=level,
        count=200,
        mean=mean,
        std=spread * mean,
        min=draws[0],
        max=draws[-1],
        quantiles=quantiles,
        share_capped=0.0,
        share_masked=0.0,
        ess=mean**2 * 200 / sum(d * d for d in draws),
    )


def step_record(step: int, micro: int = 0, *, ratio: float = 0.006, seed: int = 0, deep: bool = False) -> StepRecord:
    rng = random.Random(f"{seed}/{step}/{micro}")
    own = rng.choice((88, 104, 121, 133, 96))
    intended, clipped = 432.0, ratio * rng.lognormvariate(0, 0.25)
    base = 0.9 * rng.lognormvariate(0, 0.12) * (1 + 0.3 * step / 40)
    norm_factor = intended / (own * 4)  # Liger over reference: the larger the divisor, the smaller the gradient
    candidate, reference = base, base * clipped / norm_factor
    noise = [reference * (1 + rng.gauss(0, 1e-7)) for _ in range(2)]
    loss = rng.gauss(0.0, 0.02)
    total = candidate / reference
    window = {"liger": candidate * 2.7, "reference": reference * 2.7} if deep else {}
    points = []
    for _ in range(120):
        weight = ratio * rng.lognormvariate(0, 0.4)
        c = rng.choice((-1, 1)) * rng.lognormvariate(-7, 0.7)
        points.append(CoefPoint(candidate=c, reference=c * weight / norm_factor, ratio=weight))
    points += [CoefPoint(candidate=0.001, reference=0.0, ratio=0.0)] * 3
    paths = {
        "liger": PathRecord(
            loss=loss,
            hidden_grad_norm=candidate,
            param_grad_norm=window.get("liger"),
            normalizer=own * 4,
            normalizer_measured=own * 4.0002,
            coef_error=total - 1,
            source="measured",
        ),
        "reference": PathRecord(
            loss=loss * clipped,
            hidden_grad_norm=reference,
            param_grad_norm=window.get("reference"),
            normalizer=intended,
            normalizer_measured=intended,
            coef_error=2e-7,
        ),
    }
    for name, source, norm, error in (("corrected", "algebra", noise[0], 1e-7), ("oracle", "spec", noise[1], 0.0)):
        paths[name] = PathRecord(
            loss=loss * clipped, hidden_grad_norm=norm, normalizer=intended, coef_error=error, source=source
        )
    return StepRecord(
        step=step,
        micro_step=micro,
        accumulation=4,
        live="liger",
        live_head="fused",
        tier="deep" if deep else "spectrum",
        paths=paths,
        live_grad_norm=candidate * 2.7 if micro == 3 else None,
        gap=Gap(
            candidate="liger",
            reference="reference",
            grad_norm_ratio=total,
            param_grad_norm_ratio=total if deep else None,
            loss_diff=loss * (1 - clipped),
            cosine=0.94,
            noise_floor=3e-6,
        ),
        is_ratio=IsRatio(
            mode="sequence_mask",
            cap=3.0,
            raw=ratio_stats(rng, ratio, 0.5),
            raw_token=ratio_stats(rng, 0.8, 0.02, "token"),
            applied=ratio_stats(rng, ratio, 0.5),
            kept_mass=0.81,
            truncated_support_share=0.98,
            causes=simulated_mismatch.causes(step),
        ),
        mismatch=simulated_mismatch.mismatch(step, micro),
        canary=simulated_mismatch.canary(step) if micro == 0 else None,
        drift=simulated_mismatch.drift(step) if micro == 3 or deep else {},
        causes=[
            Cause(id="is_correction", share=0.97, factor=1 / clipped, detail="the fused path multiplies by 1"),
            Cause(id="normalizer", share=0.03, factor=norm_factor, detail="micro-batch, not generation batch"),
        ],
        unexplained=Unexplained(share=0.0, factor=1.0004, coef_error=3e-7),
        residual=3e-7 * rng.lognormvariate(0, 0.3),
        tokens=own,
        completion_tokens=own + 12,
        scatter=points,
        overhead_ms=1.4,
        step_ms=110.0,
    )


def run_info() -> RunInfo:
    return RunInfo(
        run_id="demo-7",
        created=1_760_000_000.0,
        finished=1_760_000_300.0,
        status="finished",
        driftscope="0.1.0",
        versions={"torch": "2.13.0", "trl": "0.27.2", "liger-kernel": "0.6.5", "transformers": "4.57.6", "vllm": None},
        device="cpu",
        model={"name": "tiny", "hidden_size": 64, "vocab_size": 1024, "dtype": "float32"},
        trainer={"loss_type": "dapo", "gradient_accumulation_steps": 4, "top_p": 0.8, "use_liger_loss": True},
        spec={"loss_type": "dapo", "is_correction": True, "is_mode": "sequence_mask", "is_cap": 3.0},
        settings={"spectrum_every": 1, "deep_every": 10, "gap_warning": 1.5, "gap_critical": 10.0},
        refused=[{"option": "delta", "where": "GRPOConfig", "message": "refused together with the fused loss"}],
    )


def simulated_run(n: int = 40, ratio: float = 0.006) -> Run:
    steps = [
        step_record(s, m, deep=(s - 1) % 10 == 0 and m == 3, ratio=ratio) for s in range(1, n + 1) for m in range(4)
    ]
    alerts = []
    for record in steps:
        if record.micro_step == 3:
            ratio = record.gap.grad_norm_ratio
            alerts.append(
                AlertRecord(
                    step=record.step,
                    rule="DS101",
                    severity="critical",
                    title="The fused path drops the importance sampling ratio",
                    evidence=f"Liger's hidden gradient norm is {ratio:.0f}x the reference's; the dropped ratio "
                    "alone explains "
                    f"{record.causes[0].factor:.0f}x of it.",
                    remedy="Make the sampler return unprocessed log-probs first, then train on a path that keeps "
                    "the ratio "
                    "(use_liger_loss=False, or Driftscope's corrected loss).",
                )
            )
    alerts.append(
        AlertRecord(
            step=1,
            rule="DS102",
            severity="warning",
            title="The fused path divides by the micro-batch's own tokens",
            evidence="Liger divides by 88 to 133 tokens, the configuration intends 432.",
            remedy="Use a path with the generation batch's normaliser.",
        )
    )
    if n >= simulated_mismatch.STALE_FROM + 4:
        alerts.append(
            AlertRecord(
                step=simulated_mismatch.STALE_FROM + 4,
                rule="DS211",
                severity="warning",
                title="The mismatch between trainer and engine is drifting",
                evidence="log_is_std rose by 1.3 since step 21 (trend, 9 standard errors)",
                remedy="Look at what the canary says of the engine's weights.",
            )
        )
    return Run(
        info=run_info(),
        steps=steps,
        alerts=alerts,
        notes=[NoteRecord(step=1, stage="kernel", message="No GPU: the kernel probe is off.")],
    )


def verdict() -> Verdict:
    """A verdict written by hand, so that the report is tested apart from the judgement."""
    return Verdict(
        level="critical",
        headline="The loss being optimised is not the one you configured: its gradient is 166 times too large",
        summary=[
            "Liger's fused loss, which trains this run, leaves out the importance sampling correction that the "
            "configuration asks for. That alone makes its gradient norm 173 times that of TRL's own loss.",
            "TRL's own loss is no safe way out as it stands: the ratio it applies averages 0.007, because the sampler "
            "cuts at top_p = 0.8 and reports log-probs renormalised over what it kept.",
        ],
        first_action="Make the sampler report unprocessed log-probs, or set top_p = 1.0. The ratio then returns to "
        "about 1; after that, switch to a path that keeps the correction.",
        findings=[],
    )
