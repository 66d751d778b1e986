"""What each figure of a mismatch is: formula, unit, and the names under which others log it.

The names were read in the sources: TRL 0.27.2 and 1.16.0 (trainer/grpo_trainer.py), verl of January 2026
(trainer/ppo/rollout_corr_helper.py, utils/debug/metrics.py), NeMo-RL of August 2026
(algorithms/loss/loss_functions.py, docs/guides/grpo.md) and miles of August 2026 (training_utils/loss_hub/losses.py,
examples/infra_features/train_infer_mismatch_helper). ``note`` says where another's number is not quite this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRL = "sampling/importance_sampling_ratio"
VERL = "rollout_corr"
MIS = "train/mis"  # the keys of miles' mismatch helper


@dataclass(frozen=True)
class Formula:
    """One figure. d = log p_trainer - log p_engine of a sampled token, w = exp(d); means over n tokens or m sequences.

    ``names``: framework -> the names it logs the figure under.
    """

    id: str
    formula: str
    unit: str
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""


_WEIGHT = {
    "raw.token": "w_t = exp(d_t)",
    "raw.geometric": "w_s = exp(mean_t d_t)",
    "raw.product": "w_s = exp(sum_t d_t)",
    "applied.token": "w_t = the weight that the loss multiplies the token by",
    "applied.geometric": "w_s = the geometric mean of the weights that the loss multiplies the sequence's tokens by",
    "applied.product": "w_s = the product of those weights; of a sequence-level correction, the weight itself",
}
_STATISTICS = {
    "count": ("number of weights", "1"),
    "mean": ("mean w", "ratio"),
    "std": ("sqrt(mean w^2 - (mean w)^2)", "ratio"),
    "min": ("min w", "ratio"),
    "max": ("max w", "ratio"),
    "ess": ("(sum w)^2 / (n sum w^2)", "share"),
    "chi2": ("mean w^2 - 1", "1"),
    "log_mean": ("mean log w, over w > 0", "nat"),
    "log_std": ("standard deviation of log w, over w > 0", "nat"),
    "share_outside": ("share of w outside [0.9, 1.1]", "share"),
    "share_over_cap": ("share of w at or over the cap", "share"),
    "share_under_floor": ("share of w > 0 at or under the lower bound", "share"),
    "share_zero": ("share of w = 0: masked out by the correction", "share"),
    "clamped": ("number of w with |log w| > 300", "1"),
}
_QUANTILES = ("p01", "p05", "p25", "p50", "p75", "p95", "p99")

_TRL_NOTE = "TRL logs the ratio after truncation or masking, at the level of its mode, as a mean of the ranks' means."
_VERL_NOTE = (
    "verl logs one level, the configured one; its sequence level weighs sequences by their length. Its mean and "
    "extrema are before truncation, with the log ratio held within 20; its std and ESS are of weights clamped to "
    "[1/threshold, threshold]."
)
_VERL_STATISTICS = {
    "mean": "rollout_is_mean",
    "std": "rollout_is_std",
    "min": "rollout_is_min",
    "max": "rollout_is_max",
    "ess": "rollout_is_eff_sample_size",
    "share_over_cap": "rollout_is_ratio_fraction_high",
}
_NEMO_NOTE = "The numerator is the policy that is being optimised, not the old one."


def _weight_formulas() -> list[Formula]:
    out = []
    for where, weight in _WEIGHT.items():
        for statistic, (formula, unit) in _STATISTICS.items():
            names, note = _weight_names(where, statistic)
            out.append(Formula(f"{where}.{statistic}", f"{formula}, {weight}", unit, names, note))
        out.extend(
            Formula(
                f"{where}.quantiles.{q}",
                f"the smallest w with at least {int(q[1:])}% of the weights at or under it, {weight}; log w from "
                "bins, to 5% of itself (at most 0.05 up to |log w| = 20)",
                "ratio",
            )
            for q in _QUANTILES
        )
    return out


def _weight_names(where: str, statistic: str) -> tuple[dict[str, tuple[str, ...]], str]:
    names: dict[str, tuple[str, ...]] = {}
    note = ""
    if where in ("applied.token", "applied.product") and statistic in ("mean", "min", "max"):
        names["trl"], note = (f"{TRL}/{statistic}",), _TRL_NOTE
    if where in ("raw.token", "raw.product"):
        if statistic in _VERL_STATISTICS:
            names["verl"], note = (f"{VERL}/{_VERL_STATISTICS[statistic]}",), _VERL_NOTE
        if statistic == "mean":
            names["nemo-rl"] = ("sampling_importance_ratio",)
            note = f"{note} NeMo-RL: {_NEMO_NOTE}"
        if statistic == "chi2":
            kind = "token" if where == "raw.token" else "seq"
            names.update({"verl": (f"{VERL}/chi2_{kind}",), "miles": (f"{MIS}_chi2_{kind}",)})
            note = "Both hold the log ratio within 20."
    if where == "raw.token" and statistic == "mean":
        names["miles"] = (f"{MIS}_tis_weight_before_bound",)
    return names, note


_BOTH_PPL = "Means over sequences of the sequence's own value."
_OTHERS = (
    Formula("tokens", "n: tokens in the mask with a finite d", "1"),
    Formula("sequences", "m: sequences with at least one of them", "1"),
    Formula("unscored", "tokens in the mask whose engine log-prob is NaN", "1"),
    Formula("nonfinite", "other tokens in the mask whose d is NaN or infinite", "1"),
    Formula("incomplete", "sequences of which a token was left out", "1"),
    Formula("mean_length", "n / m", "token"),
    Formula("cap", "upper bound of the applied ratio", "ratio", {"trl": ("vllm_importance_sampling_cap",)}),
    Formula("floor", "lower bound of the applied ratio", "ratio", {"trl": ("vllm_importance_sampling_clip_min",)}),
    Formula("share_outside", "share of tokens with w outside [0.9, 1.1]", "share"),
    Formula("log_difference.mean", "mean d", "nat"),
    Formula(
        "log_difference.abs_mean",
        "mean |d|",
        "nat",
        {"trl": ("sampling/sampling_logp_difference/mean",), "miles": ("train/train_rollout_logprob_abs_diff",)},
        "TRL: mean of the ranks' means. miles: mean over samples of the sample's mean.",
    ),
    Formula("log_difference.std", "standard deviation of d", "nat"),
    Formula("log_difference.abs_max", "max |d|", "nat", {"trl": ("sampling/sampling_logp_difference/max",)}),
    Formula("log_difference.mult_prob_error", "mean exp|d|", "ratio", {"nemo-rl": ("token_mult_prob_error",)}),
    Formula(
        "divergence.k1",
        "mean(-d), k1 estimate of KL(engine || trainer)",
        "nat",
        {"verl": (f"{VERL}/kl",), "miles": (f"{MIS}_kl",)},
    ),
    Formula(
        "divergence.k3",
        "mean(w - 1 - d), k3 estimate of KL(engine || trainer)",
        "nat",
        {
            "verl": (f"{VERL}/k3_kl",),
            "nemo-rl": ("gen_kl_error",),
            "miles": (f"{MIS}_k3_kl", "train/train_rollout_kl"),
        },
        "NeMo-RL: with its default kl_type k3. miles' train_rollout_kl holds each token within [-10, 10].",
    ),
    Formula("divergence.k1_reverse", "mean(w d), k1 estimate of KL(trainer || engine), reweighted", "nat"),
    Formula(
        "divergence.k3_reverse",
        "mean(exp(-d) - 1 + d)",
        "nat",
        {"nemo-rl": ("policy_kl_error",)},
        "A k3 estimate of KL(trainer || engine) only on tokens drawn from the trainer; these are the engine's.",
    ),
    Formula(
        "divergence.js",
        "mean over both policies of the k3 terms against their even mixture",
        "nat",
        {"nemo-rl": ("js_divergence_error",)},
    ),
    Formula(
        "divergence.chi2_token",
        "mean_t w_t^2 - 1",
        "1",
        {"verl": (f"{VERL}/chi2_token",), "miles": (f"{MIS}_chi2_token",)},
        "Both hold d within 20.",
    ),
    Formula(
        "divergence.chi2_sequence",
        "mean_s exp(2 sum_t d_t) - 1",
        "1",
        {"verl": (f"{VERL}/chi2_seq",), "miles": (f"{MIS}_chi2_seq",)},
        "Both hold sum d within 20.",
    ),
    *(
        Formula(
            f"perplexity.{name}",
            formula,
            unit,
            {"verl": (f"{VERL}/{other}",), **({"miles": (f"{MIS}_{other}",)} if miles else {})},
            _BOTH_PPL,
        )
        for name, formula, unit, other, miles in (
            ("trainer", "mean_s exp(-mean_t log p_trainer)", "perplexity", "training_ppl", True),
            ("engine", "mean_s exp(-mean_t log p_engine)", "perplexity", "rollout_ppl", True),
            ("ratio", "mean_s exp(-mean_t d_t)", "ratio", "ppl_ratio", True),
            ("log_trainer", "mean_s(-mean_t log p_trainer)", "nat", "training_log_ppl", True),
            ("log_engine", "mean_s(-mean_t log p_engine)", "nat", "rollout_log_ppl", True),
            ("log_diff", "mean_s(-mean_t d_t)", "nat", "log_ppl_diff", True),
            ("log_abs_diff", "mean_s |mean_t d_t|", "nat", "log_ppl_abs_diff", True),
            ("log_diff_max", "max_s(-mean_t d_t)", "nat", "log_ppl_diff_max", False),
            ("log_diff_min", "min_s(-mean_t d_t)", "nat", "log_ppl_diff_min", False),
        )
    ),
    Formula(
        "probability.correlation",
        "Pearson correlation of p_trainer and p_engine",
        "1",
        {"verl": ("training/rollout_actor_probs_pearson_corr",)},
    ),
    *(
        Formula(
            f"probability.abs_diff_{name}",
            f"{name} of |p_trainer - p_engine|",
            "probability",
            {"verl": (f"training/rollout_probs_diff_{name}",)},
            "verl divides by n - 1." if name == "std" else "",
        )
        for name in ("mean", "max", "std")
    ),
    *(
        Formula(f"log_difference.{kind}.{q}", f"quantile {q[1:]}% of {of}, from bins, to 5% of itself", "nat")
        for kind, of in (("quantiles", "d"), ("abs_quantiles", "|d|"))
        for q in _QUANTILES
    ),
)

FORMULAS: dict[str, Formula] = {formula.id: formula for formula in (*_weight_formulas(), *_OTHERS)}
"""Figure id (the path of the field in ``Mismatch``) -> what it is."""
