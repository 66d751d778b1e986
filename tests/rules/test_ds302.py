from __future__ import annotations

import pytest

from driftscope.doctor.facts import Facts, FlowFix, GradientFlow
from driftscope.rules import Thresholds
from driftscope.rules.ds302_no_gradient import BY_CUT, RULE, ZERO

INPUTS = FlowFix(name="enable_input_require_grads", line="model.enable_input_require_grads()", works=True)


def found(**flow):
    flow = {"missing": ("x.lora_A", "x.lora_B"), "trainable": 5, "adapters": 4, "adapters_missing": 2} | flow
    return RULE.predict(Facts(flow=GradientFlow(**flow)), Thresholds())


def test_some_adapters_are_a_warning_and_all_are_critical():
    assert found().severity == "warning"
    finding = found(adapters=2)
    assert finding.severity == "critical" and finding.title == "All adapters train on nothing"
    assert "2 of 2 adapter parameters" in finding.evidence


def test_without_adapters_all_parameters_count():
    assert found(adapters=0, adapters_missing=0).severity == "warning"
    assert found(adapters=0, adapters_missing=0, trainable=2).severity == "critical"


def test_an_unexplained_zero_counts():
    finding = found(missing=(), zero=("x.lora_B",), adapters_missing=1)
    assert finding.severity == "warning" and "1 get an exact zero" in finding.evidence
    assert finding.remedy == ZERO


@pytest.mark.parametrize("kind", [kind for kind in BY_CUT if kind != "after"])
def test_the_remedy_names_the_module(kind):
    assert "model.odd" in found(cut_kind=kind, cut_at="model.odd").remedy


def test_the_remedy_is_the_one_that_works():
    assert found(cut_kind="reentrant", cut_at="m", fixes=(INPUTS,)).remedy == "model.enable_input_require_grads()."
    assert found().remedy == RULE.remedy


def test_a_whole_flow_does_not():
    assert found(missing=(), adapters_missing=0) is None
    assert found(error="element 0") is None, "DS301 speaks"
    assert found(missing=(), trainable=0) is None
    assert RULE.predict(Facts(), Thresholds()) is None
