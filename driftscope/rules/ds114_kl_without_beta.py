"""DS114: options of the KL term that have no effect because beta is 0."""

from __future__ import annotations

from driftscope.doctor.facts import Facts
from driftscope.rules._settings import grpo_settings
from driftscope.rules.base import Finding, Rule, Thresholds

SWITCHES = ("use_bias_correction_kl", "sync_ref_model")
DETAILS = ("ref_model_mixup_alpha", "ref_model_sync_steps")


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires where beta is 0 and an option of the KL term or of the reference model is set."""
    settings = grpo_settings(facts)
    if settings is None or float(settings.get("beta", 0.0)) != 0.0:
        return None
    on = [name for name in SWITCHES if name in settings.given and settings.get(name)]  # may be on by default
    details = [name for name in DETAILS if name in settings.given]
    if not on and not details:
        return None
    named = ", ".join(f"{name}={settings.get(name)}" for name in (*on, *details))
    evidence = f"beta=0 and {named}: without a KL term no reference model is loaded"
    if "sync_ref_model" in on:
        evidence += ", and there is none to synchronise"
    if settings.refusal is not None:
        evidence += f"; TRL refuses the settings: {settings.refusal}"
    return Finding("warning" if on else "info", RULE.title, evidence, RULE.remedy)


RULE = Rule(
    code="DS114",
    name="kl-without-beta",
    title="Options of the KL term have no effect, because beta is 0",
    group="loss paths",
    why=(
        "beta is the weight of the KL term, and its default in TRL is 0: the term is not computed and no reference "
        "model exists. use_bias_correction_kl changes that term alone, and sync_ref_model and the ref_model_* "
        "settings write to that model. A run that sets them without beta trains without a KL term and does not say so "
        "(TRL 0.27.2), or is refused by the trainer's constructor (sync_ref_model in TRL 1.16)."
    ),
    condition=(
        "beta is 0 and use_bias_correction_kl or sync_ref_model was switched on (warning), or ref_model_mixup_alpha "
        "or ref_model_sync_steps is set (info)."
    ),
    remedy="Set beta (DeepSeek-R1: 0.001) if the KL term is wanted, else take these options out.",
    source="doctor",
    predict=predict,
)
