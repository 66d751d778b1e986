"""The record format: what one line of ``records.jsonl`` and the whole of ``run.json`` hold.

These models are the boundary between what measures (torch) and what shows (console, report, CI). A field that could
not be had is ``None``: unavailable, never "fine". JSON has no NaN or infinity; such a value is written as ``null`` and
its field is named in ``nonfinite``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from driftscope.mismatch.model import Mismatch

SCHEMA_VERSION = 1

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
PathName = Literal["liger", "reference", "corrected", "oracle"]
Tier = Literal["light", "spectrum", "deep"]
CauseId = Literal[
    "is_correction",
    "normalizer",
    "tool_mask",
    "kl_bias_correction",
    "delta_clamp",
    "logit_transform",
    "head_adapter",
    "extra_terms",
    "accumulation_dtype",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", protected_namespaces=())


class PathRecord(_Model):
    """One loss path on one micro-batch.

    ``source``: ``measured`` (the live backward), ``algebra`` (the path's own loss code on the captured log-probs),
    ``fused_call`` (its real fused call on the captured hidden states), ``spec`` (Driftscope's float64 algebra).
    """

    loss: float | None = None
    hidden_grad_norm: float | None = Field(None, description="sqrt(sum |dL/dh|^2) over the completion positions")
    param_grad_norm: float | None = Field(
        None, description="L2 norm of the gradient of all trainable parameters over the accumulation window"
    )
    normalizer: float | None = Field(None, description="the divisor that this path's own code uses (claimed)")
    normalizer_measured: float | None = Field(None, description="the divisor that its coefficients imply")
    coef_error: float | None = Field(None, description="relative error of the token coefficients against the oracle")
    source: Literal["measured", "algebra", "fused_call", "spec"] = "algebra"
    fused_call_error: float | None = Field(
        None, description="relative difference of the real fused call's hidden gradient from the path's algebra"
    )
    note: str | None = Field(None, description="why a value is unavailable")


class PathCost(_Model):
    """What one path's head, loss and their backward cost on the user's own micro-batch, without the trunk."""

    time_ms: float | None = None
    peak_bytes: int | None = Field(None, description="device memory beyond what was allocated before; GPU only")
    note: str | None = Field(None, description="why a value is unavailable")


class Gap(_Model):
    """Candidate against reference on one micro-batch; ratios are candidate / reference."""

    candidate: str
    reference: str
    grad_norm_ratio: float | None = Field(None, description="hidden_grad_norm, candidate / reference")
    param_grad_norm_ratio: float | None = Field(None, description="param_grad_norm over the window; deep steps only")
    loss_diff: float | None = None
    cosine: float | None = Field(None, description="cosine of the two hidden gradients")
    noise_floor: float | None = Field(
        None, description="relative rounding noise of the hidden gradient on this hardware and dtype, measured"
    )


class RatioStats(_Model):
    """Distribution of an importance sampling ratio over the tokens or sequences that are trained on."""

    level: Literal["token", "sequence"]
    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    quantiles: dict[str, float | None] = Field(default_factory=dict, description="p01 p05 p25 p50 p75 p95 p99")
    share_capped: float | None = Field(None, description="share at or over the cap (truncated)")
    share_masked: float | None = Field(None, description="share set to zero by a *_mask mode")
    ess: float | None = Field(None, description="effective sample size (sum w)^2 / (n sum w^2), in (0, 1]")


class Cause(_Model):
    """One field on which two paths differ.

    ``factor``: what the difference alone multiplies the hidden gradient norm by (candidate / reference).
    ``share``: its part of the gap, in [0, 1]; shares and ``unexplained.share`` sum to 1.
    """

    id: str
    share: float
    factor: float | None = None
    detail: str | None = None


class Unexplained(_Model):
    """What is left of the gap between measured and explained coefficients."""

    share: float
    factor: float | None = None
    coef_error: float | None = None


class IsRatio(_Model):
    """The importance sampling ratio: raw (old against sampling log-probs) and as the loss applies it."""

    mode: str | None = None
    cap: float | None = None
    raw: RatioStats | None = None
    raw_token: RatioStats | None = None
    applied: RatioStats | None = None
    kept_mass: float | None = Field(
        None, description="mean probability mass that top_p/top_k/min_p keeps, under the trainer's own distribution"
    )
    truncated_support_share: float | None = Field(
        None, description="share of the mean log ratio that the kept mass explains"
    )
    causes: list[Cause] = Field(default_factory=list)
    note: str | None = None


class CanaryRecord(_Model):
    """The weight-sync canary: which weights the sampling engine agrees with, on a few tokens sampled just before.

    All figures are root mean squares of log-prob differences in nats a token.
    """

    tokens: int = 0
    agrees_with: Literal["current", "previous", "adapter_off", "part"] = "current"
    stale_modules: list[str] = Field(default_factory=list, description="modules whose weights are old in the engine")
    snapshot_step: int | None = Field(None, description="step of the older weights that were compared")
    distances: dict[str, float] = Field(
        default_factory=dict, description="engine against the trainer under: current, previous, adapter_off"
    )
    noise_floor: float | None = Field(
        None, description="the trainer against itself: other batch split, other attention order"
    )
    bf16_noise: float | None = Field(None, description="the trainer against itself in bfloat16")
    own_shift: float | None = Field(None, description="the batch's old log-probs against a rescoring, dropout off")
    rms: float | None = Field(None, description="the log ratio")
    rest_rms: float | None = Field(None, description="what no known cause explains of it")
    tokenizer: list[str] | None = Field(
        None, description="what differs between the engine's tokenizer and the trainer's; null where it was not asked"
    )
    note: str | None = None


class ViolationRecord(_Model):
    """A limit of the threshold profile that the mismatch crosses, the noise floor allowed for."""

    limit: str
    figure: str = Field(description="key of driftscope.mismatch.FORMULAS")
    value: float
    allowed: float = Field(description="the limit as it was applied: the profile's, or a multiple of the noise floor")
    nominal: float = Field(description="the profile's limit")
    source: str = ""


class DriftRecord(_Model):
    """One watched series at this step, and what its detectors make of it."""

    value: float | None = None
    baseline: float | None = Field(None, description="level that the detectors take for normal; null in warm-up")
    floor: float | None = Field(None, description="deviation below which nothing alarms: the noise floor's multiple")
    state: Literal["warm-up", "quiet", "alarm"] = "warm-up"
    kind: str | None = Field(None, description="of the open episode: spike, shift, trend or bias")
    started: int | None = Field(None, description="step at which the open episode began, estimated")
    score: float | None = Field(None, description="deviation of the open episode in standard errors")
    level: float | None = Field(None, description="level since the change, where an alarm is told at this step")
    fresh: bool = Field(False, description="whether an alarm is told at this step")


class Estimate(_Model):
    """A figure with its standard error: 0 where it is exact."""

    value: float | None = None
    error: float | None = Field(None, description="one standard error, in the unit of the value")


class ModuleGradient(_Model):
    """One module's part of the two gradients."""

    name: str
    candidate: float | None = Field(None, description="L2 norm of the candidate's gradient")
    reference: float | None = Field(None, description="L2 norm of the reference's gradient")
    cosine: float | None = None
    share: float | None = Field(None, description="part of the squared difference, in [0, 1]")


class BiasRecord(_Model):
    """The signed relative difference of two gradients over the deep steps so far: what stays of it."""

    steps: int = Field(description="deep steps averaged")
    size: Estimate = Field(description="norm of the expected relative difference (bias)")
    noise: float | None = Field(None, description="root mean square of one step's relative difference")
    score: float | None = Field(None, description="squared bias in its standard errors under no bias at all")
    along: Estimate | None = Field(
        None, description="mean part along the live gradient: -0.01 where what was accumulated is 1% too short"
    )
    module: str | None = Field(None, description="module with the largest part of the squared bias")
    along_module: str | None = Field(None, description="module with the largest part of ``along``")


class GradientRecord(_Model):
    """Full-parameter gradients over one accumulation window and all ranks; deep steps only.

    ``sketch``: from linear sketches of ``size`` buckets a module, with standard errors; ``exact``: from the gradients.
    """

    method: Literal["exact", "sketch"]
    size: int | None = Field(None, description="buckets of a module's sketch; null where exact")
    candidate: str | None = None
    reference: str | None = None
    norms: dict[str, Estimate] = Field(default_factory=dict, description="L2 norm by path")
    norm_ratio: Estimate | None = Field(None, description="candidate / reference")
    cosine: Estimate | None = None
    difference: Estimate | None = Field(None, description="|candidate - reference| / |reference|")
    modules: list[ModuleGradient] = Field(default_factory=list, description="largest share of the difference first")
    accumulated: Estimate | None = Field(
        None, description="|g - live| / |live|: g is what the trainer accumulated, live the same path recomputed"
    )
    bias: BiasRecord | None = Field(None, description="of g against live, over the deep steps so far")


class RankRow(_Model):
    """One rank's share of a micro-batch. Norms and normalisers are the rank's own, before the mean over ranks."""

    rank: int
    tokens: int | None = None
    normalizer: float | None = Field(None, description="the divisor that the live path's code uses there (claimed)")
    normalizer_measured: float | None = Field(None, description="the divisor that the live coefficients imply there")
    loss: float | None = None
    hidden_grad_norm: float | None = None
    coef_error: float | None = None
    is_ratio_mean: float | None = Field(None, description="mean of the raw token ratio")
    residual: float | None = None
    step_ms: float | None = None
    overhead_ms: float | None = None
    failed: int = Field(0, description="stages of Driftscope that are off there")


class RanksRecord(_Model):
    """What the ranks of a distributed run had to say at this step."""

    processes: int
    rows: list[RankRow] = Field(default_factory=list, description="analysed steps; the 64 most deviating at most")
    missing: list[int] = Field(default_factory=list, description="ranks whose measurement is not in this record")
    slowest: int | None = Field(None, description="rank with the longest own time in the step")
    slowest_ms: float | None = Field(None, description="its own time, waiting for other ranks left out")
    median_ms: float | None = Field(None, description="median of the other ranks' own times")
    disagree: dict[str, list[int]] = Field(
        default_factory=dict, description="what should be the same on all ranks -> ranks on which it is not"
    )


class CadenceRecord(_Model):
    """How often Driftscope measures at the moment, and what it has spent."""

    spectrum_every: int
    deep_every: int
    spent: float | None = Field(None, description="share of the run's step time so far")
    budget: float | None = Field(None, description="the share that max_overhead allows; null without one")


class CoefPoint(_Model):
    """One sampled token for the scatter of coefficients."""

    candidate: float | None
    reference: float | None
    ratio: float | None = Field(None, description="applied importance sampling ratio at this token")


class StepRecord(_Model):
    """One analysed micro-batch."""

    kind: Literal["step"] = "step"
    schema_: int = Field(SCHEMA_VERSION, alias="schema")
    time: float | None = Field(None, description="seconds since the epoch")
    step: int = Field(description="optimizer step, 1-based: the step this micro-batch contributes to")
    micro_step: int = Field(description="index of the micro-batch in its accumulation window, 0-based")
    accumulation: int | None = Field(None, description="micro-batches in the window")
    rank: int = 0
    tier: Tier = "spectrum"
    live: str
    live_head: str | None = Field(None, description="'fused' or 'full': how the live path gets its log-probs")
    paths: dict[str, PathRecord] = Field(default_factory=dict)
    live_grad_norm: float | None = Field(None, description="what the trainer clips on; last micro-batch of the window")
    gap: Gap | None = None
    is_ratio: IsRatio | None = None
    mismatch: Mismatch | None = None
    violations: list[ViolationRecord] = Field(default_factory=list)
    canary: CanaryRecord | None = None
    drift: dict[str, DriftRecord] = Field(default_factory=dict, description="watched series, by name")
    causes: list[Cause] = Field(default_factory=list)
    unexplained: Unexplained | None = None
    residual: float | None = Field(None, description="part of the live hidden gradient that no coefficient explains")
    tokens: int | None = Field(None, description="completion tokens that the loss should train on")
    completion_tokens: int | None = Field(None, description="unmasked completion tokens, tool results included")
    zero_advantage_share: float | None = None
    head: dict[str, Any] = Field(default_factory=dict, description="the head's measured transform")
    profile: dict[str, PathCost] = Field(default_factory=dict, description="cost of each path; deep steps only")
    scatter: list[CoefPoint] = Field(default_factory=list)
    gradient: GradientRecord | None = Field(None, description="full-parameter gradients; deep steps, last micro-batch")
    ranks: RanksRecord | None = Field(None, description="what each rank contributed; with several processes")
    cadence: CadenceRecord | None = Field(None, description="last micro-batch of a window")
    judged: bool = Field(False, description="the rules have been evaluated; their alerts follow in the journal")
    nonfinite: list[str] = Field(default_factory=list, description="names of values that were NaN or infinite")
    unavailable: dict[str, str] = Field(default_factory=dict, description="signal -> why it could not be had")
    overhead_ms: float = 0.0
    step_ms: float | None = Field(None, description="wall time of the micro-batch's training step, without overhead")

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", protected_namespaces=(), populate_by_name=True)


class AlertRecord(_Model):
    """One finding, as the console shows it and ``driftscope check`` counts it."""

    kind: Literal["alert"] = "alert"
    schema_: int = Field(SCHEMA_VERSION, alias="schema")
    time: float | None = None
    step: int
    rule: str
    severity: Severity
    title: str
    evidence: str
    remedy: str
    rank: int = 0

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", populate_by_name=True)


class NoteRecord(_Model):
    """Something that happened to Driftscope itself: a probe that failed and was switched off, a gap in the journal."""

    kind: Literal["note"] = "note"
    schema_: int = Field(SCHEMA_VERSION, alias="schema")
    time: float | None = None
    step: int
    stage: str
    message: str
    rank: int = 0

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", populate_by_name=True)


class RunInfo(_Model):
    """``run.json``: what ran, on which stack, with which settings."""

    schema_: int = Field(SCHEMA_VERSION, alias="schema")
    run_id: str
    created: float
    finished: float | None = None
    status: Literal["running", "finished", "failed"] = "running"
    driftscope: str
    versions: dict[str, str | None] = Field(default_factory=dict)
    device: str | None = None
    model: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict, description="the settings of the run that the loss reads")
    spec: dict[str, Any] = Field(default_factory=dict, description="the configured loss (LossSpec)")
    settings: dict[str, Any] = Field(default_factory=dict, description="Driftscope's own settings")
    refused: list[dict[str, str]] = Field(
        default_factory=list, description="options the fused path refuses with an error: option, where, message"
    )

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", protected_namespaces=(), populate_by_name=True)
