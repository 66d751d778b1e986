from __future__ import annotations

import pytest

from tests.rules.settings_facts import configured, predicted


@pytest.mark.parametrize(
    "facts",
    [
        configured(fp16=True, dtype="float16"),
        configured(fp16=True, model_init_kwargs={"dtype": "float16"}),
        configured(fp16=True, use_peft=True, model={"dtype": "float32", "dtypes": {"float32": 9, "float16": 2}}),
        configured(trainer="reward", fp16=True, dtype="float16"),
    ],
)
def test_float16_weights_under_the_scaler_are_critical(facts):
    finding = predicted("DS404", facts)
    assert finding.severity == "critical" and "float16" in finding.evidence


@pytest.mark.parametrize(
    "facts",
    [
        configured(fp16=True, dtype="float32"),
        configured(fp16=False, dtype="float16"),
        configured(fp16=True, dtype="float16", use_peft=True),
        configured(fp16=True, dtype="float16", model={"dtype": "float32", "dtypes": {"float32": 9}}),
    ],
)
def test_float32_weights_and_no_scaler_are_not(facts):
    assert predicted("DS404", facts) is None
