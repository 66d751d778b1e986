from __future__ import annotations

import pytest

from tests.rules.settings_facts import configured, predicted

RUN = {
    "use_vllm": True,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "max_completion_length": 4096,
    "bf16": True,
}


def test_measured_noise_that_crosses_the_cap_is_a_warning():
    finding = predicted("DS204", configured(model={"logp_noise": 0.02}, **RUN))
    assert finding.severity == "warning"
    # ln 3 / 4096; 0.02 * sqrt(4096) = 1.28; P(N(0, 1.28) > ln 3) = 19.5%
    assert "2.68e-04" in finding.evidence and "1.28" in finding.evidence and "20%" in finding.evidence
    assert "measured on this model" in finding.evidence


def test_a_drift_smaller_than_the_noise_of_a_token_is_a_note():
    finding = predicted("DS204", configured(model={"logp_noise": 0.004}, **RUN))
    assert finding.severity == "info"


def test_without_a_measurement_the_noise_of_the_dtype_is_assumed_and_said():
    finding = predicted("DS204", configured(**RUN))
    assert finding.severity == "warning"
    assert "0.0200 (not measured: assumed for bfloat16)" in finding.evidence


def test_the_older_name_of_the_cap_counts():
    values = {k: v for k, v in RUN.items() if k != "vllm_importance_sampling_clip_max"}
    values |= {"vllm_importance_sampling_cap": 1.5, "vllm_importance_sampling_mode": "sequence_truncate"}
    finding = predicted("DS204", configured(model={"logp_noise": 0.01}, **values))
    assert "cap of 1.5" in finding.evidence and "truncated" in finding.evidence


@pytest.mark.parametrize(
    "change",
    [
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"max_completion_length": 32},
        {"bf16": False, "dtype": "float32"},
        {"use_vllm": False},
        {"vllm_importance_sampling_correction": False},
        {"vllm_importance_sampling_clip_max": None},
        {"model": {"logp_noise": 0.0}},
    ],
)
def test_it_stays_quiet_where_the_product_is_safe(change):
    assert predicted("DS204", configured(**(RUN | change))) is None
