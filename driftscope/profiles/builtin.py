"""The profiles that come along, each limit with its source."""

from __future__ import annotations

from driftscope.profiles.profile import Profile

_VERL_DOC = "verl, docs/algo/rollout_corr.md (January 2026), check_rollout_correction_health: "
_NEMO_DOC = "NeMo-RL, docs/guides/grpo.md (August 2026): "
VERL = Profile(
    name="verl",
    ratio_mean_low=0.5,
    ratio_mean_high=2.0,
    ratio_std_high=1.0,
    ess_low=0.3,
    kl_high=0.1,
    chi2_token_high=1.0,
    sources={
        "ratio_mean_low": _VERL_DOC + "rollout_is_mean < 0.5",
        "ratio_mean_high": _VERL_DOC + "rollout_is_mean > 2.0",
        "ratio_std_high": _VERL_DOC + "rollout_is_std > 1.0 (of weights that verl clamps first)",
        "ess_low": _VERL_DOC + "rollout_is_eff_sample_size < 0.3",
        "kl_high": _VERL_DOC + "abs(kl) > 0.1",
        "chi2_token_high": _VERL_DOC + "chi2_token > 1.0",
    },
)
NEMO = Profile(
    name="nemo",
    k3_high=1e-3,
    mult_prob_error_high=1.05,
    sources={
        "k3_high": _NEMO_DOC + "gen_kl_error, 'values below 1e-3 considered acceptable'",
        "mult_prob_error_high": "NeMo-RL, docs/adding-new-models.md and docs/guides/dtensor-tp-accuracy.md "
        "(August 2026): token_mult_prob_error over 1.05 needs investigation (for equal precision)",
    },
)
TRL = Profile(
    name="trl",
    ratio_max_high=3.0,
    first_step_log_diff_high=0.03,
    sources={
        "ratio_max_high": "TRL, GRPOConfig: vllm_importance_sampling_cap (0.27.2), vllm_importance_sampling_clip_max "
        "(1.16.0), both 3.0 by default: larger ratios are truncated or masked",
        "first_step_log_diff_high": "miles, training_utils/log_utils.py (August 2026), its CI check: mean trainer and "
        "rollout log-probs within 0.03. TRL names no such limit",
    },
)
STRICT = Profile(
    name="strict",
    ratio_mean_low=0.9,
    ratio_mean_high=1.1,
    ratio_std_high=0.5,
    ratio_max_high=3.0,
    ess_low=0.5,
    kl_high=0.01,
    k3_high=1e-3,
    chi2_token_high=0.1,
    chi2_sequence_high=1.0,
    mult_prob_error_high=1.02,
    share_outside_high=0.05,
    first_step_log_diff_high=0.01,
    sources={
        "ratio_mean_low": "Driftscope: the band [0.9, 1.1] that single tokens are counted by",
        "ratio_mean_high": "Driftscope: the band [0.9, 1.1] that single tokens are counted by",
        "ratio_std_high": "Driftscope: half of verl's",
        "ratio_max_high": "TRL's default cap",
        "ess_low": "Driftscope: half of the samples; verl warns under 0.3",
        "kl_high": "Driftscope: a tenth of verl's",
        "k3_high": "NeMo-RL's",
        "chi2_token_high": "Driftscope: a tenth of verl's",
        "chi2_sequence_high": "Driftscope: verl's limit for tokens, on the sequence product",
        "mult_prob_error_high": _NEMO_DOC + "token_mult_prob_error rising 'past ~1-2%'",
        "share_outside_high": "Driftscope: one token in twenty",
        "first_step_log_diff_high": "Driftscope: a third of miles'",
    },
)
PROFILES: dict[str, Profile] = {profile.name: profile for profile in (STRICT, VERL, NEMO, TRL)}
