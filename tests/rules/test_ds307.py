from __future__ import annotations

from driftscope.doctor.facts import Facts, Settings
from tests.rules.reward_facts import facts, found

REFUSED = "NoMatchingPeftModuleError: No modules were targeted for adaptation."


def test_an_adapter_that_no_gradient_reaches():
    finding = found("DS307", facts(adapters=2, adapters_reached=0))
    assert finding.severity == "critical"
    assert "2 modules carry an adapter" in finding.evidence
    assert "0.687" in finding.evidence


def test_no_adapter_at_all():
    assert "0 modules" in found("DS307", facts(adapters=0, adapters_reached=0)).evidence


def test_a_refusal_by_peft_is_told():
    assert "No modules were targeted" in found("DS307", facts(peft_error=REFUSED)).evidence
    assert found("DS307", facts(peft_error="AttributeError: another")) is None


def test_a_configuration_alone_is_enough():
    settings = Settings(trainer="reward", values={"use_peft": True, "lora_target_modules": ["nope"]})
    finding = found("DS307", Facts(settings=settings, unavailable={"model": REFUSED}))
    assert "lora_target_modules=['nope']" in finding.evidence
    assert found("DS307", Facts(settings=settings, unavailable={"model": "OSError: no such file"})) is None
    assert found("DS307", Facts(settings=Settings(trainer="reward"), unavailable={"model": REFUSED})) is None


def test_what_was_not_measured_is_not_judged():
    assert found("DS307", facts()) is None
    assert found("DS307", facts(adapters_reached=1)) is None
    assert found("DS307", facts(adapters=None, adapters_reached=None)) is None  # prompt tuning
    assert found("DS307", facts(adapters_reached=0, loss_error="RuntimeError: no grad_fn")) is None
    assert found("DS307", facts(adapters_reached=0, loss_change=0.0)) is None  # the pairs do not differ
    assert found("DS307", facts(peft=False, adapters=None, adapters_reached=None)) is None
