from __future__ import annotations

import pytest
import torch

from tests.rules.settings_facts import configured, predicted


@pytest.mark.parametrize(("share", "severity"), [(0.99, "critical"), (0.5, "warning")])
def test_the_measured_share_decides(share, severity):
    facts = configured(learning_rate=1e-6, model={"dtype": "bfloat16", "lost_update_share": share})
    finding = predicted("DS403", facts)
    assert finding.severity == severity and "bfloat16" in finding.evidence


def test_without_a_measurement_coarse_weights_are_a_warning_with_the_size_that_is_lost():
    finding = predicted("DS403", configured(learning_rate=1e-6, dtype="bfloat16"))
    assert finding.severity == "warning" and "not measured" in finding.evidence
    assert "over 5.12e-04 in magnitude" in finding.evidence


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 9), (torch.float16, 12)])
def test_the_size_that_is_said_to_be_lost_is(dtype, bits):
    rate = 1e-6
    w = torch.linspace(rate * 2**bits, 1.0, 10_000).to(dtype)
    w = w[w.float() > rate * 2**bits]
    assert bool((w + rate == w).all())


@pytest.mark.parametrize(
    "facts",
    [
        configured(learning_rate=1e-6, model={"dtype": "bfloat16", "lost_update_share": 0.01}),
        configured(learning_rate=1e-6, dtype="float32"),
        configured(learning_rate=1e-6, dtype="bfloat16", use_peft=True),  # PEFT's adapters are float32
        configured(learning_rate=1e-6, dtype="auto"),
        configured(learning_rate=0.0, dtype="bfloat16"),
    ],
)
def test_fine_weights_and_unknown_ones_do_not_fire(facts):
    assert predicted("DS403", facts) is None
