"""A loss path as data: which terms of the GRPO family are on, with which values.

Two paths differ where their specs differ; ``driftscope.algebra`` turns a spec and a batch into loss and coefficients.
Terms and names follow TRL's ``GRPOConfig`` from 0.27.2 to 1.16.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from driftscope.errors import UsageError

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
Level = Literal["token", "sequence"]
IsMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Normalizer = Literal[
    "sequence",  # mean over sequences of the per-sequence token mean (grpo, sapo)
    "micro_batch",  # trained tokens of this micro-batch (bnpo; Liger's dapo and cispo in one process)
    "micro_batch_over_ranks",  # the mean of these over the ranks (Liger's dapo and cispo)
    "max_length",  # B * max_completion_length (dr_grpo)
    "generation_batch",  # num_items_in_batch / num_processes, no accumulation divisor (dapo, cispo until TRL 1.9)
    "generation_batch_rescaled",  # the same times accumulation_steps / steps_per_generation (TRL 1.10 on)
    "sequence_sum",  # mean over sequences of the per-sequence token sum (luspo, TRL 1.16)
    "length_weighted",  # mean over (B, T or 1) of token loss times the sequence's length (luspo, Liger, older TRL)
]

DEFAULT_NORMALIZER: dict[str, Normalizer] = {
    "grpo": "sequence",
    "sapo": "sequence",
    "bnpo": "micro_batch",
    "dr_grpo": "max_length",
    "dapo": "generation_batch_rescaled",
    "cispo": "generation_batch_rescaled",
    "vespo": "generation_batch_rescaled",
    "luspo": "sequence_sum",
}

# Read once: a spec is made in every micro-batch, and many in a search.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_type": get_args(LossType),
    "importance_sampling_level": get_args(Level),
    "is_mode": get_args(IsMode),
    "normalizer": (None, *get_args(Normalizer)),
}


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Every term of TRL's GRPO loss, 0.27.2 to 1.16.

    Raises ``UsageError`` for a value outside its domain, with the reason.
    """

    loss_type: LossType = "dapo"
    # Policy term
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None  # upper clamp of the ratio, two-sided clipping
    importance_sampling_level: Level = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    # KL to the reference model (k3 estimator)
    beta: float = 0.0
    kl_bias_correction: bool = False
    # Importance sampling correction of the sampling engine's mismatch
    is_correction: bool = False
    is_mode: IsMode = "sequence_mask"
    is_cap: float | None = 3.0  # upper bound C of the ratio
    is_floor: float | None = None  # lower bound of the ratio
    # Masks
    tool_mask: bool = False
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    # Entropy bonus
    entropy_coef: float = 0.0
    # Normaliser
    normalizer: Normalizer | None = None  # None: the loss type's own
    accumulation_steps: int = 1  # micro-batches per optimizer step
    steps_per_generation: int | None = None  # None: equal to accumulation_steps
    num_processes: int = 1
    max_completion_length: int | None = None
    # Head: how hidden states become log-probs
    temperature: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    head_adapter: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(repr(a) for a in allowed if a is not None)
                value = getattr(self, name)
                raise UsageError(f"{name}={value!r} is not a term of TRL's GRPO loss; use one of {known}.")
        divisors = ("temperature", "accumulation_steps", "num_processes")
        for name in (*divisors, "sapo_temperature_pos", "sapo_temperature_neg"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}={getattr(self, name)!r} must be positive: the loss divides by it.")
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise UsageError(f"top_entropy_quantile={self.top_entropy_quantile!r} must lie in [0, 1]: a quantile.")

    @property
    def effective_normalizer(self) -> Normalizer:
        """The normaliser in force: the one set, or the loss type's own."""
        return self.normalizer or DEFAULT_NORMALIZER[self.loss_type]

    def replace(self, **changes: Any) -> LossSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """The spec as plain JSON types."""
        return dataclasses.asdict(self)

    def differences(self, other: LossSpec) -> dict[str, tuple[Any, Any]]:
        """The fields on which two specs differ: name -> (self's value, other's value)."""
        return {
            f.name: (getattr(self, f.name), getattr(other, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        }
