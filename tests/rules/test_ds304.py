from __future__ import annotations

import pytest

from driftscope.doctor.facts import Facts, Settings
from tests.rules.reward_facts import FROZEN, facts, found


def test_no_task_type_leaves_the_head_frozen():
    finding = found("DS304", facts(task_type=None, **FROZEN))
    assert finding.severity == "critical"
    assert "gradient norm of score after one backward: 0" in finding.evidence
    assert 'task_type="SEQ_CLS", modules_to_save=["score"]' in finding.remedy


def test_a_refusal_by_peft_is_told():
    error = "AttributeError: no attribute 'prepare_inputs_for_generation'"
    unknown = dict.fromkeys(("head_trains", "head_saved", "adapters", "reward_shape", "head_grad_norm", "loss_change"))
    finding = found("DS304", facts(task_type="CAUSAL_LM", peft_error=error, **unknown))
    assert finding.severity == "critical"
    assert "prepare_inputs_for_generation" in finding.evidence


def test_a_language_model_is_told_to_be_loaded_as_a_reward_model():
    changes = {"head": None, "head_modules": (), "head_trains": None, "head_saved": None, "reward_shape": (4, 512)}
    finding = found("DS304", facts(task_type="CAUSAL_LM", model_class="Qwen2ForCausalLM", **changes))
    assert "logits are (4, 512)" in finding.evidence
    assert "AutoModelForSequenceClassification" in finding.remedy


@pytest.mark.parametrize(("task", "severity"), [(None, "info"), ("TOKEN_CLS", "warning")])
def test_a_head_that_trains_all_the_same_is_less_bad(task, severity):
    assert found("DS304", facts(task_type=task)).severity == severity


def test_the_right_one_and_a_model_without_an_adapter_are_left_alone():
    assert found("DS304", facts()) is None
    assert found("DS304", facts(peft=False, task_type=None)) is None


def settings(**values):
    return Settings(trainer="reward", values={"use_peft": True, "lora_task_type": "CAUSAL_LM", **values})


def test_a_configuration_alone_is_enough():
    unavailable = {"model": "AttributeError: prepare_inputs_for_generation"}
    finding = found("DS304", Facts(settings=settings(), unavailable=unavailable))
    assert finding.severity == "critical"
    assert "lora_task_type=CAUSAL_LM" in finding.evidence
    assert "prepare_inputs_for_generation" in finding.evidence
    assert "lora_task_type: SEQ_CLS" in finding.remedy


def test_a_right_configuration_and_another_trainer_are_left_alone():
    assert found("DS304", Facts(settings=settings(lora_task_type="SEQ_CLS"))) is None
    assert found("DS304", Facts(settings=settings(use_peft=False))) is None
    values = {"use_peft": True, "lora_task_type": "CAUSAL_LM"}
    assert found("DS304", Facts(settings=Settings(trainer="grpo", values=values))) is None
