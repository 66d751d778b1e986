from __future__ import annotations

from tests.rules.reward_facts import FROZEN, facts, found


def test_a_random_frozen_head_is_found_with_how_it_is_known():
    finding = found("DS306", facts(**FROZEN))
    assert finding.severity == "warning"
    assert "the checkpoint (model.safetensors) has no score.weight" in finding.evidence
    assert "gradient norm of score after one backward: 0" in finding.evidence
    assert "reward_lora_config" in finding.remedy


def test_without_peft_the_line_unfreezes_the_head():
    assert found("DS306", facts(peft=False, **FROZEN)).remedy == "model.score.requires_grad_(True)"


def test_where_nothing_else_learns_it_is_critical():
    assert found("DS306", facts(peft=True, adapters_reached=0, **FROZEN)).severity == "critical"


def test_a_head_that_trains_or_is_adapted_or_was_trained_is_left_alone():
    assert found("DS306", facts()) is None
    assert found("DS306", facts(**{**FROZEN, "head_adapted": True})) is None
    assert found("DS306", facts(**FROZEN, head_random=False)) is None
    assert found("DS306", facts(**FROZEN, head_random=None)) is None
    assert found("DS306", facts(head=None, head_trains=None)) is None
