from __future__ import annotations

import pytest

from driftscope.doctor import Facts, Settings
from tests.rules.settings_facts import configured, predicted


@pytest.mark.parametrize("name", ["use_bias_correction_kl", "sync_ref_model"])
def test_an_option_that_is_on_without_beta_is_a_warning(name):
    finding = predicted("DS114", configured(beta=0.0, **{name: True}))
    assert finding.severity == "warning" and f"{name}=True" in finding.evidence


def test_details_of_the_synchronisation_are_a_note():
    finding = predicted("DS114", configured(beta=0.0, ref_model_mixup_alpha=0.5))
    assert finding.severity == "info" and "ref_model_mixup_alpha=0.5" in finding.evidence


def test_the_refusal_of_trl_is_quoted():
    assert "nothing to sync" in predicted("DS114", configured(sync_ref_model=True, refusal="nothing to sync")).evidence


@pytest.mark.parametrize(
    "values", [{"beta": 0.04, "sync_ref_model": True}, {"beta": 0.0}, {"use_bias_correction_kl": False}]
)
def test_it_stays_quiet_with_beta_or_without_options(values):
    assert predicted("DS114", configured(**values)) is None


def test_what_is_on_by_default_was_not_asked_for():
    settings = Settings(values={"beta": 0.0, "use_bias_correction_kl": True, "ref_model_sync_steps": 512})
    assert predicted("DS114", Facts(settings=settings)) is None
