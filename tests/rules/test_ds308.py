from __future__ import annotations

from driftscope.doctor.facts import Facts
from tests.rules.reward_facts import facts, found


def test_two_labels_are_two_rewards():
    finding = found("DS308", facts(num_labels=2, reward_shape=(2,)))
    assert finding.severity == "warning"
    assert "2 logits a sequence (num_labels=2)" in finding.evidence
    assert "num_labels=1" in finding.remedy


def test_logits_a_token_are_no_reward():
    finding = found("DS308", facts(reward_shape=(7, 512), model_class="Qwen2ForCausalLM"))
    assert finding.severity == "critical"
    assert "Qwen2ForCausalLM answers logits of shape (7, 512)" in finding.evidence


def test_one_number_and_an_unknown_shape_are_left_alone():
    assert found("DS308", facts()) is None
    assert found("DS308", facts(reward_shape=None, num_labels=2)) is None
    assert found("DS308", Facts()) is None
