from __future__ import annotations

from tests.rules.reward_facts import FROZEN, facts, found


def test_a_frozen_random_head_is_lost():
    finding = found("DS305", facts(modules_to_save=(), **FROZEN))
    assert finding.severity == "critical"
    assert "PEFT saves no weight of score" in finding.evidence
    assert "it is frozen" in finding.evidence
    assert 'modules_to_save=["score"]' in finding.remedy


def test_an_adapter_on_the_head_does_not_count_as_saved():
    finding = found("DS305", facts(**{**FROZEN, "head_adapted": True}))
    assert finding.severity == "critical"
    assert "LoRA adapter works on it" in finding.evidence


def test_a_head_that_was_unfrozen_by_hand_is_trained_and_lost():
    changes = {"head_saved": False, "unsaved": ("score",), "head_random": False}
    finding = found("DS305", facts(**changes))
    assert finding.severity == "critical"
    assert "lost with the checkpoint" in finding.evidence


def test_a_head_that_came_with_the_checkpoint_is_a_warning():
    assert found("DS305", facts(**FROZEN, head_random=False)).severity == "warning"


def test_what_else_stands_before_the_logits_counts_too():
    finding = found("DS305", facts(head="classifier", head_modules=("pooler", "classifier"), unsaved=("pooler",)))
    assert finding.severity == "warning"
    assert "PEFT saves no weight of pooler" in finding.evidence
    assert 'modules_to_save=["pooler", "classifier"]' in finding.remedy


def test_a_saved_head_and_a_model_without_an_adapter_are_left_alone():
    assert found("DS305", facts()) is None
    assert found("DS305", facts(peft=False, head_saved=None)) is None
