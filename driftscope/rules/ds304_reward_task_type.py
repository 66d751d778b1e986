"""DS304: the task type of the adapter is not that of a reward model."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.doctor.facts import Facts, RewardFacts
from driftscope.records import Severity
from driftscope.rules._reward import RIGHT_TASK, config_line, gradient, load_line, refusal, with_peft
from driftscope.rules.base import Finding, Rule, Thresholds

TITLE = "The adapter's task type is not that of a reward model"


def predict(facts: Facts, thresholds: Thresholds) -> Finding | None:
    """Fires for every task type but SEQ_CLS; how bad it is, the model tells."""
    if facts.reward is not None:
        return _measured(facts.reward) if facts.reward.peft and facts.reward.task_type != RIGHT_TASK else None
    settings = with_peft(facts)
    if settings is None or settings.get("lora_task_type") == RIGHT_TASK:
        return None
    why = refusal(facts)
    evidence = f"lora_task_type={settings.get('lora_task_type')}" + (
        f"; building the model raised {why}" if why else ""
    )
    return Finding("critical", TITLE, evidence, f"lora_task_type: {RIGHT_TASK}  # --lora_task_type {RIGHT_TASK}")


def _measured(reward: RewardFacts) -> Finding:
    parts = [f"task_type={reward.task_type} on {printable(reward.model_class)}"]
    severity: Severity = "critical"
    remedy = config_line(reward)
    if reward.peft_error is not None:
        parts.append(f"PEFT refuses it: {printable(reward.peft_error)}")
    elif reward.head is None:
        shape = reward.reward_shape
        parts.append(
            f"its logits are {shape} a sequence, where a reward is (1,)" if shape else "it has no reward head"
        )
        remedy = f"{load_line()}; {remedy.partition('  #')[0]}"
    elif not (reward.head_trains and reward.head_saved):
        trains = "does not train" if not reward.head_trains else "is not saved"
        parts.append(f"the head {printable(reward.head)} {trains}")
        parts.append(gradient(reward))
    else:
        parts.append(f"the head {printable(reward.head)} trains and is saved all the same")
        severity = "info"
        if reward.task_type is not None:
            severity = "warning"
            parts.append("AutoPeftModelForSequenceClassification refuses to load an adapter of that type")
    return Finding(severity, TITLE, "; ".join(p for p in parts if p), remedy)


RULE = Rule(
    code="DS304",
    name="reward-task-type",
    title=TITLE,
    group="gradient flow and PEFT",
    why=(
        "With task type SEQ_CLS PEFT keeps the modules named score and classifier trainable and saves them with the "
        "adapter. With another type, or none, a randomly initialised reward head stays frozen, and it is not saved: "
        "after loading, the adapter sits under another random head. CAUSAL_LM, the default of TRL's ModelConfig, is "
        "refused by PEFT for a sequence classification model of transformers 4.57 and 5; on a causal language model "
        "the pairwise loss runs, but compares logits token by token, which are no rewards."
    ),
    condition=(
        "PEFT is in use and its task type is not SEQ_CLS. Critical where PEFT refuses it, where the model has no head "
        "for a reward, or where the head does not train or is not saved; else a warning, and information where no "
        "task type is set."
    ),
    remedy=(
        'peft_config = driftscope.reward_lora_config(model), which sets task_type="SEQ_CLS"; in a configuration '
        "lora_task_type: SEQ_CLS. A causal language model is loaded as a reward model with "
        "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)."
    ),
    source="doctor",
    predict=predict,
)
