from __future__ import annotations

import pytest

from driftscope.rules import Thresholds, evaluate
from tests.record_factory import honest_ratio, step, truncated_ratio
from tests.rules.settings_facts import configured, predicted


def found(record, **limits):
    return next((a for a in evaluate(record, Thresholds(**limits)) if a.rule == "DS201"), None)


@pytest.mark.parametrize(
    ("kept", "mean", "severity"),
    [(0.81, 0.0063, "critical"), (0.97, 0.4, "warning"), (0.97, 0.9, "warning"), (0.999, 0.97, "info")],
)
def test_truncated_support_fires_by_its_effect(kept, mean, severity):
    alert = found(step(is_ratio=truncated_ratio(kept, mean)))
    assert alert.severity == severity
    assert "token_truncate" in alert.remedy


def test_an_honest_ratio_does_not():
    assert found(step(is_ratio=honest_ratio())) is None
    assert found(step()) is None


def test_a_kept_mass_that_explains_little_does_not():
    ratio = truncated_ratio(0.98, 0.01)
    ratio.truncated_support_share = 0.1
    assert found(step(is_ratio=ratio)) is None


def test_without_a_share_the_token_ratio_decides():
    ratio = truncated_ratio()
    ratio.truncated_support_share = None
    assert found(step(is_ratio=ratio)).severity == "critical"
    ratio.raw_token.mean = 0.2
    assert found(step(is_ratio=ratio)) is None


def test_an_unknown_kept_mass_says_nothing():
    ratio = truncated_ratio()
    ratio.kept_mass = None
    assert found(step(is_ratio=ratio)) is None


def test_a_correction_that_is_off_is_only_information():
    ratio = truncated_ratio()
    ratio.applied = None
    assert found(step(is_ratio=ratio)).severity == "info"


def test_a_token_mode_is_not_advised_to_those_who_have_one():
    alert = found(step(is_ratio=truncated_ratio(0.81, 0.81, "token_truncate")))
    assert alert.severity == "warning"
    assert "token_truncate" not in alert.remedy


SAMPLED = {"use_vllm": True, "vllm_importance_sampling_correction": True, "max_completion_length": 24}


@pytest.mark.parametrize(
    ("kept", "mode", "severity"),
    [
        (0.81, "sequence_mask", "critical"),
        (0.96, "sequence_truncate", "warning"),
        (0.995, "sequence_mask", "info"),
        (0.81, "token_truncate", "warning"),
        (0.995, "token_mask", "info"),
    ],
)
def test_the_measured_kept_mass_foretells_the_ratio(kept, mode, severity):
    facts = configured(model={"kept_mass": kept}, top_p=0.8, vllm_importance_sampling_mode=mode, **SAMPLED)
    finding = predicted("DS201", facts)
    assert finding.severity == severity
    assert "measured on this model" in finding.evidence
    assert ("24 tokens" in finding.evidence) == mode.startswith("sequence")
    if mode.startswith("sequence"):
        assert f"{kept**24:.2g}"[:3] in finding.evidence


@pytest.mark.parametrize(
    ("length", "mode", "severity"),
    [(256, "sequence_mask", "critical"), (24, "sequence_mask", "warning"), (256, "token_truncate", "warning")],
)
def test_without_a_measurement_the_bounds_are_told(length, mode, severity):
    values = SAMPLED | {"top_p": 0.8, "vllm_importance_sampling_mode": mode, "max_completion_length": length}
    finding = predicted("DS201", configured(**values))
    assert finding.severity == severity
    assert "not measured: each token's ratio lies between top_p = 0.800 and 1" in finding.evidence


def test_top_k_alone_bounds_nothing_and_says_so():
    finding = predicted("DS201", configured(top_k=20, vllm_importance_sampling_mode="sequence_mask", **SAMPLED))
    assert finding.severity == "warning"
    assert "not measured" in finding.evidence and "top_k=20" in finding.evidence


def test_generation_kwargs_truncate_as_well():
    facts = configured(generation_kwargs={"top_p": 0.8}, vllm_importance_sampling_mode="sequence_mask", **SAMPLED)
    assert "top_p=0.8" in predicted("DS201", facts).evidence


def test_a_ratio_that_is_not_applied_is_foreseen_as_a_note():
    values = SAMPLED | {"vllm_importance_sampling_correction": False, "top_p": 0.8}
    assert predicted("DS201", configured(**values)).severity == "info"


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 1.0},
        {"use_vllm": False},
        {"trainer": "reward"},
        {"logprobs_mode": "raw_logprobs"},
        {"model": {"kept_mass": 1.0}},
    ],
)
def test_nothing_is_foreseen_where_the_ratio_carries_no_kept_mass(change):
    assert predicted("DS201", configured(**(SAMPLED | {"top_p": 0.8} | change))) is None
