from __future__ import annotations

from driftscope.doctor.facts import Facts, FlowFix, GradientFlow, RewardFacts
from driftscope.rules import Thresholds
from driftscope.rules.ds301_backward_raises import RULE

INPUTS = FlowFix(
    name="enable_input_require_grads", line="model.enable_input_require_grads()", works=True, saved_bytes=3 * 2**20
)
OFF = FlowFix(
    name="gradient_checkpointing=False", line="GRPOConfig(gradient_checkpointing=False)", works=True, saved_bytes=2**30
)


def raising(**more):
    return GradientFlow(
        **{
            "missing": ("a.lora_A", "a.lora_B"),
            "cut_at": "model.layers.0",
            "cut_kind": "reentrant",
            "error": "element 0 of tensors does not require grad and does not have a grad_fn",
            "trainable": 2,
            "adapters": 2,
            "adapters_missing": 2,
            "checkpointing": "reentrant",
            "fixes": (INPUTS, OFF),
        }
        | more
    )


def found(flow, **more):
    return RULE.predict(Facts(flow=flow, **more), Thresholds())


def test_a_backward_that_raises_is_critical():
    finding = found(raising())
    assert finding.severity == "critical"
    assert "2 of 2 trainable parameters" in finding.evidence and "model.layers.0" in finding.evidence
    assert "element 0 of tensors" in finding.evidence


def test_the_remedy_is_the_line_that_works_with_its_cost_and_the_others_beside_it():
    assert found(raising()).remedy == (
        "model.enable_input_require_grads() (the forward keeps 3.00 MiB for the backward of the batch measured). Or: "
        "GRPOConfig(gradient_checkpointing=False) (the forward keeps 1.00 GiB for the backward of the batch measured)."
    )


def test_a_remedy_that_does_not_work_is_not_given():
    broken = FlowFix(name="enable_input_require_grads", line="model.enable_input_require_grads()", works=False)
    finding = found(raising(fixes=(broken, OFF)))
    assert finding.remedy.startswith("GRPOConfig(gradient_checkpointing=False)")
    assert "tried without success: enable_input_require_grads" in finding.evidence
    assert found(raising(fixes=(broken,))).remedy == RULE.remedy


def test_nothing_to_train_has_a_remedy_of_its_own():
    finding = found(raising(missing=(), trainable=0, adapters=0, adapters_missing=0, fixes=()))
    assert finding.title == "The model has nothing to train" and "peft_config" in finding.remedy


def test_nothing_to_train_is_found_where_the_backward_works_too():
    flow = GradientFlow(missing=(), trainable=0, message="The model has no trainable parameter.")
    assert found(flow).title == "The model has nothing to train"


def test_a_reward_models_flow_counts():
    facts = Facts(flow=GradientFlow(missing=()), reward=RewardFacts(head="score", flow=raising()))
    assert RULE.predict(facts, Thresholds()) is not None


def test_a_backward_that_works_does_not():
    assert found(GradientFlow(missing=(), trainable=2)) is None
    assert found(raising(error=None)) is None
    assert RULE.predict(Facts(), Thresholds()) is None
