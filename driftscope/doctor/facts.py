"""The facts that the doctor's rules judge. Plain data: no torch, no TRL.

A fact that could not be had is ``None``, with its reason in ``Facts.unavailable``; it is never a good sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["honoured", "dropped", "differs", "refused", "unavailable"]
Checkpointing = Literal["none", "reentrant", "non-reentrant"]
CutKind = Literal["reentrant", "reentrant-keyword", "detached", "inside", "not called", "no_grad", "after"]


@dataclass(frozen=True, kw_only=True)
class FeatureRow:
    """What one loss path of the installed stack does with one feature of the loss, as it was measured."""

    feature: str
    """Cause id where there is one (is_correction, normalizer ...), else the setting (loss_type=dapo ...)."""
    path: str
    """``liger`` (TRL's fused loss path) or ``reference`` (TRL's own)."""
    status: Status
    """honoured: coefficients equal the oracle's with the feature on; dropped: equal to those with it off; differs:
    equal to neither; refused: an error was raised; unavailable: could not be tried."""
    factor: float | None = None
    """Hidden-gradient norm of the path / of the oracle with the feature on."""
    error: float | None = None
    """Relative error of the path's token coefficients against the oracle with the feature on."""
    message: str = ""
    """The error where refused, the reason where unavailable, else empty."""
    in_use: bool = False
    """Whether the configuration at hand has the feature on."""


@dataclass(frozen=True, kw_only=True)
class StackTable:
    """The stack probe's result."""

    rows: tuple[FeatureRow, ...]
    live: str
    """The path that the configuration at hand trains on: ``liger`` or ``reference``."""
    versions: Mapping[str, str]
    seconds: float

    def find(self, feature: str, path: str | None = None) -> FeatureRow | None:
        """The row of a feature on a path; the live one by default."""
        wanted = path or self.live
        return next((r for r in self.rows if r.feature == feature and r.path == wanted), None)


@dataclass(frozen=True, kw_only=True)
class FlowFix:
    """One remedy for a cut gradient, tried on the model."""

    name: Literal["enable_input_require_grads", "use_reentrant=False", "gradient_checkpointing=False"]
    line: str
    """The line of code, or the setting, that applies it."""
    works: bool
    """Whether every trainable parameter had a gradient with it."""
    saved_bytes: int | None = None
    """Bytes of tensors that the forward keeps for the backward with this fix in place."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class GradientFlow:
    """Which trainable parameters a real backward reaches."""

    missing: tuple[str, ...]
    """Names of the trainable parameters that get no gradient; all of them where the backward raises."""
    zero: tuple[str, ...] = ()
    """Names of the parameters whose gradient is exactly zero without the structure of LoRA's start explaining it."""
    cut_at: str | None = None
    """Name of the module where the graph was cut."""
    message: str = ""
    """One sentence: what happens, where and why."""
    error: str | None = None
    """What the backward raised."""
    trainable: int = 0
    """Number of trainable parameters (tensors)."""
    cut_kind: CutKind | None = None
    """How the graph is cut; ``None`` where nothing is missing or the place was not found."""
    adapters: int = 0
    """Number of trainable parameters (tensors) that belong to adapters."""
    adapters_missing: int = 0
    """How many of those get no gradient, or an unexplained zero."""
    checkpointing: Checkpointing = "none"
    fixes: tuple[FlowFix, ...] = ()
    """Remedies that were tried, the best first; empty where nothing is missing."""

    @property
    def ok(self) -> bool:
        """Whether every trainable parameter gets a gradient."""
        return not self.missing and not self.zero and self.error is None


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """A reward model under the real RewardTrainer: one batch, one backward."""

    head: str | None
    """Name of the module that maps hidden states to the reward."""
    num_labels: int | None = None
    pad_token_id: int | None = None
    padding_shift: float | None = None
    """Relative change of the reward of a sequence when padding is added to its end; ``None`` where not measured."""
    padding_error: str | None = None
    """What a padded batch raised."""
    peft: bool = False
    task_type: str | None = None
    modules_to_save: tuple[str, ...] = ()
    adapters: int | None = None
    """Number of modules that carry an adapter; ``None`` without PEFT."""
    head_trains: bool | None = None
    """Whether the head as a whole is trainable (its own weight requires a gradient)."""
    head_saved: bool | None = None
    """Whether the head's trained weights are in what PEFT saves (modules_to_save)."""
    head_random: bool | None = None
    """Whether the head's weight is still a random initialisation."""
    head_random_evidence: str = ""
    head_grad_norm: float | None = None
    """Gradient norm of the head's weight after one backward of the pairwise loss; 0 where it has none."""
    loss_change: float | None = None
    """Change of the pairwise (Bradley-Terry) loss when the head's weight is perturbed by 1%, relative."""
    loss_error: str | None = None
    """What the trainer's own loss raised on the batch."""
    input_grads: bool | None = None
    """Whether the embedding's output requires a gradient during the forward."""
    flow: GradientFlow | None = None
    flow_error: str | None = None
    """Why ``flow`` could not be measured."""
    model_class: str = ""
    """Name of the model's class, without PEFT's wrapper."""
    reward_shape: tuple[int, ...] | None = None
    """Shape of the logits of one sequence: (1,) for a reward."""
    head_modules: tuple[str, ...] = ()
    """The head and whatever else with weights stands between backbone and logits, in the order of the forward."""
    unsaved: tuple[str, ...] = ()
    """Those of ``head_modules`` whose weights are not in what PEFT saves; empty without PEFT."""
    head_adapted: bool | None = None
    """Whether an adapter works on the head; ``None`` without PEFT."""
    adapters_reached: int | None = None
    """Number of adapted modules of which some adapter weight got a gradient other than zero."""
    peft_error: str | None = None
    """What PEFT raised when it was to put the adapter on the model."""
    pairs: int = 0
    """Number of pairs (chosen, rejected) in the batch."""
    loss: float | None = None
    """The pairwise loss of the batch."""
    trainer: bool = False
    """Whether a trainer's own batch and loss were used; else a synthetic batch, or the one given."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was measured on the policy itself, or on a shrunk random copy of its architecture."""

    model_type: str = ""
    copy: bool = False
    """Whether a shrunk random copy was measured, not the model itself."""
    dtype: str = ""
    """dtype of most trainable weights: float32, bfloat16, float16."""
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Number of trainable weights by dtype."""
    lost_update_share: float | None = None
    """Share of trainable weights that an optimizer step of size learning_rate leaves unchanged by rounding."""
    kept_mass: float | None = None
    """Mean probability mass per token that the configured top_p, top_k and min_p keep."""
    logp_noise: float | None = None
    """Standard deviation of a token's log-prob between the run's dtype and float32."""
    reference_kl: float | None = None
    """Mean k3 KL a token between policy and reference model before the first step."""
    reference: str = ""
    """Where the reference comes from, in words."""
    log_collision: float | None = None
    """Mean over sampled tokens of log sum_v p_v^2, nats, at the sampling temperature: times the number of tokens it is
    the log-probability that two completions of a prompt are identical."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Which of these could not be measured -> why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A configuration: TRL's own names and values, defaults filled in."""

    trainer: str = "grpo"
    """``grpo``, ``reward`` or another command of TRL."""
    values: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    """The names that were set, as opposed to left at their default."""
    source: str = ""
    refusal: str | None = None
    """What TRL's own classes raised for these settings."""
    processes: int = 1
    """Number of processes: as launched, else one a CUDA device of this machine."""
    logprobs_mode: str | None = None
    """Which log-probs the installed TRL asks its sampling engine for (``processed_logprobs``: of the distribution that
    is sampled; ``raw_logprobs``: before temperature and truncation); ``None`` where its code does not say."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting, ``default`` where the installed TRL has none of that name or where it is unset."""
        value = self.values.get(name, default)
        return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that was found out about a run that has not begun."""

    settings: Settings | None = None
    stack: StackTable | None = None
    flow: GradientFlow | None = None
    reward: RewardFacts | None = None
    model: ModelFacts | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured -> why."""
