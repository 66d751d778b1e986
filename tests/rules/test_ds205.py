from __future__ import annotations

import math

import pytest

from tests.rules.settings_facts import configured, predicted


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_critical(temperature):
    assert predicted("DS205", configured(temperature=temperature)).severity == "critical"


def test_greedy_sampling_by_generation_kwargs_is_critical():
    finding = predicted("DS205", configured(temperature=1.0, generation_kwargs={"temperature": 0.0}))
    assert finding.severity == "critical" and "generation_kwargs" in finding.evidence


@pytest.mark.parametrize("correction", [True, False])
def test_sampling_at_another_temperature_than_is_scored(correction):
    facts = configured(
        temperature=1.0,
        generation_kwargs={"temperature": 0.7},
        use_vllm=True,
        vllm_importance_sampling_correction=correction,
    )
    finding = predicted("DS205", facts)
    assert finding.severity == "warning"
    assert "0.7" in finding.evidence and "temperature=1" in finding.evidence
    assert finding.remedy == "Set temperature=0.7 and take it out of generation_kwargs."


def test_raw_log_probs_lack_the_temperature():
    run = {"temperature": 0.7, "use_vllm": True, "vllm_importance_sampling_correction": True}
    assert "raw" in predicted("DS205", configured(logprobs_mode="raw_logprobs", **run)).evidence
    assert predicted("DS205", configured(logprobs_mode="processed_logprobs", **run)) is None
    assert predicted("DS205", configured(logprobs_mode="raw_logprobs", **run | {"temperature": 1.0})) is None


def test_completions_that_repeat_are_judged_by_the_measured_collision():
    run = {"temperature": 0.05, "max_completion_length": 10}
    finding = predicted("DS205", configured(model={"log_collision": math.log(0.97)}, **run))
    assert finding.severity == "warning" and "74%" in finding.evidence  # 0.97^10
    assert predicted("DS205", configured(model={"log_collision": math.log(0.9)}, **run)) is None


def test_without_a_measurement_a_very_low_temperature_is_a_note():
    assert predicted("DS205", configured(temperature=0.1)).severity == "info"
    assert predicted("DS205", configured(temperature=0.7)) is None


def test_other_trainers_have_no_temperature_to_judge():
    assert predicted("DS205", configured(trainer="reward", temperature=0.0)) is None
