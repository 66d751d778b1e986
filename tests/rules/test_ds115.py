from __future__ import annotations

import pytest

from tests.rules.settings_facts import configured, predicted


@pytest.mark.parametrize(("kl", "severity"), [(0.04, "warning"), (1e-4, "info")])
def test_a_kl_at_the_start_fires_by_its_size(kl, severity):
    facts = configured(beta=0.1, model={"reference_kl": kl, "logp_noise": 0.0, "reference": "the adapter 'ref'"})
    finding = predicted("DS115", facts)
    assert finding.severity == severity and "the adapter 'ref'" in finding.evidence


@pytest.mark.parametrize(
    "model",
    [
        {"reference_kl": 0.0},
        {"reference_kl": None},
        {"reference_kl": 4e-4, "logp_noise": 0.02},  # (3 * 0.02)^2 / 2 = 1.8e-3
        {"reference_kl": 0.04, "copy": True},
    ],
)
def test_rounding_a_copy_and_what_was_not_measured_do_not(model):
    assert predicted("DS115", configured(beta=0.1, model=model)) is None
