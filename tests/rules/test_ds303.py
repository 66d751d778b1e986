from __future__ import annotations

import pytest

from driftscope.doctor.facts import Facts, FlowFix, GradientFlow
from driftscope.rules import Thresholds
from driftscope.rules.ds303_checkpoint_inputs import RULE

INPUTS = FlowFix(name="enable_input_require_grads", line="model.enable_input_require_grads()", works=False)
OTHER = FlowFix(name="use_reentrant=False", line="GRPOConfig(x)", works=True)


def found(**flow):
    flow = {"missing": ("a", "b"), "trainable": 3, "cut_at": "model.layers.0", "cut_kind": "reentrant"} | flow
    return RULE.predict(Facts(flow=GradientFlow(**flow)), Thresholds())


@pytest.mark.parametrize("kind", ["reentrant", "reentrant-keyword"])
@pytest.mark.parametrize("error", [None, "element 0"])
def test_reentrant_checkpointing_that_cuts_is_critical(kind, error):
    finding = found(cut_kind=kind, error=error)
    assert finding.severity == "critical" and "model.layers.0" in finding.evidence


def test_the_remedy_is_the_one_that_works():
    assert found(fixes=(INPUTS, OTHER)).remedy == "GRPOConfig(x)."
    assert found().remedy == RULE.remedy


def test_other_cuts_and_whole_flows_do_not():
    assert found(cut_kind="detached") is None
    assert found(missing=(), cut_kind=None, checkpointing="reentrant") is None
    assert RULE.predict(Facts(), Thresholds()) is None
