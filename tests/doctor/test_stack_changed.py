"""The stack probe on a changed TRL, on configurations and trainers; and that it leaves the process as it was."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.qwen2 import modeling_qwen2
from trl import GRPOTrainer

from driftscope.doctor.facts import Facts, Settings, StackTable
from driftscope.doctor.foresee import foresee
from driftscope.errors import UnsupportedTrainerError, UsageError
from driftscope.hooks.doctor.stack import probe_stack
from tests.hooks.runs import HAS_LIGER_LOSS, IS_SEED_STACK, reset_accelerate, trainer

DROPPED, HONOURED, REFUSED = "dropped", "honoured", "refused"
HEADS = ("logit_softcap", "logit_scale", "head_adapter")


def one(table: StackTable, feature: str, path: str = "reference") -> str:
    row = table.find(feature, path)
    assert row is not None
    return row.status


def test_a_trl_that_forgets_the_ratio_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real TRL with one term taken out of its loss: no table of versions could know."""
    real = GRPOTrainer._compute_loss

    def forgetful(self: Any, model: Any, inputs: Any) -> Any:
        if "importance_sampling_ratio" in inputs:
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
        return real(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", forgetful)
    table = probe_stack(Settings(values={"use_vllm": True}))
    assert one(table, "is_correction") == DROPPED
    assert one(table, "tool_mask") == one(table, "temperature") == HONOURED
    found = foresee(Facts(stack=table))
    assert "DS102" in found.rules and "DS109" not in found.rules


def test_a_trl_that_forgets_delta_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GRPOTrainer._compute_loss

    def forgetful(self: Any, model: Any, inputs: Any) -> Any:
        kept, self.args.delta = self.args.delta, None
        try:
            return real(self, model, inputs)
        finally:
            self.args.delta = kept

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", forgetful)
    assert foresee(Facts(stack=probe(delta=3.0))).rules == ("DS106",)
    assert foresee(Facts(stack=probe())).rules == ()


def test_what_only_happens_together_is_unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GRPOTrainer._compute_loss

    def odd(self: Any, model: Any, inputs: Any) -> Any:
        loss = real(self, model, inputs)
        return loss * 2 if self.beta != 0.0 and self.temperature != 1.0 else loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", odd)
    found = foresee(Facts(stack=probe(beta=0.1, temperature=0.8)))
    assert found.rules == ("DS109",)
    assert "2.00" in found[0].evidence
    assert foresee(Facts(stack=probe(beta=0.1))).rules == ()


def test_a_trl_that_scales_its_loss_differs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 1.5 * real(self, model, inputs))
    table = probe_stack()
    own = [row for row in table.rows if row.path == "reference" and row.factor is not None]
    assert len(own) > 10
    known = {"steps_per_generation", "loss_type=luspo"}  # off by another factor before
    for row in own:
        if row.feature not in known:
            assert (row.status, row.factor) == ("differs", pytest.approx(1.5, rel=1e-4)), row
    assert "DS112" in foresee(Facts(stack=table)).rules


def test_a_term_that_breaks_alone_does_not_silence_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GRPOTrainer._compute_loss

    def fragile(self: Any, model: Any, inputs: Any) -> Any:
        if "tool_mask" in inputs:
            raise KeyError("no such mask")
        return real(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", fragile)
    table = probe_stack()
    row = table.find("tool_mask", "reference")
    assert row is not None and row.status == "unavailable" and "no such mask" in row.message
    assert one(table, "delta") == HONOURED


# -- the configuration at hand ---------------------------------------------------------------------------------------


def probe(**values: Any) -> StackTable:
    return probe_stack(Settings(values=values))


def test_what_the_configuration_uses_is_marked() -> None:
    table = probe(
        use_vllm=True,
        beta=0.1,
        use_bias_correction_kl=True,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
        temperature=0.9,
        importance_sampling_level="sequence",
    )
    used = {row.feature for row in table.rows if row.in_use}
    assert used == {
        "is_correction", "normalizer", "steps_per_generation", "kl_bias_correction", "temperature",
        "importance_sampling_level=sequence", "loss_type=dapo", "configuration",
    }  # fmt: skip
    assert {row.feature for row in probe(gradient_accumulation_steps=1).rows if row.in_use} == {
        "loss_type=dapo",
        "configuration",
    }


def test_a_loss_without_a_gradient_is_not_judged() -> None:
    table = probe(top_entropy_quantile=0.0, epsilon=0.0, importance_sampling_level="sequence", loss_type="cispo")
    row = table.find("configuration", "reference")
    assert row is not None and row.status == "unavailable" and "no gradient" in row.message


def test_steps_per_generation_follows_the_generation_batch() -> None:
    table = probe(generation_batch_size=32, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    row = table.find("steps_per_generation", "reference")
    assert row is not None and row.in_use
    whole = table.find("configuration", "reference")
    assert whole is not None and whole.factor == pytest.approx(0.25 if IS_SEED_STACK else 1.0, rel=1e-4)


def test_the_configuration_is_measured_as_a_whole() -> None:
    plain = probe(gradient_accumulation_steps=4, steps_per_generation=4, beta=0.02, use_vllm=True, delta=2.0)
    assert one(plain, "configuration") == HONOURED
    other = probe(gradient_accumulation_steps=4, steps_per_generation=16, beta=0.02, use_vllm=True)
    row = other.find("configuration", "reference")
    assert row is not None
    if IS_SEED_STACK:
        assert (
            row.status == "differs" and row.factor is not None and 0.2 < row.factor < 0.3
        )  # 4 / 16 of the policy term
        assert foresee(Facts(stack=other)).rules[0] == "DS112"
    else:
        assert row.status == HONOURED
        assert foresee(Facts(stack=other)).rules == ()


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss")
def test_the_seeds_configuration_is_found_out_before_the_run() -> None:
    table = probe(use_liger_kernel=True, use_vllm=True, gradient_accumulation_steps=4)
    assert table.live == "liger"
    found = foresee(Facts(stack=table))
    assert {"DS102", "DS103", "DS111"} <= set(found.rules)
    assert not {"DS104", "DS105", "DS106", "DS107", "DS108", "DS109", "DS112", "DS113"} & set(found.rules)
    critical = foresee(Facts(stack=probe(use_liger_kernel=True, delta=2.0)))
    assert critical[0].rule == "DS111" and critical[0].severity == "critical"
    assert "two-sided" in critical[0].evidence
    calm = foresee(Facts(stack=probe(use_liger_kernel=False, use_vllm=True, gradient_accumulation_steps=4)))
    assert calm.rules == ()


def test_a_configuration_that_trl_refuses_is_said_to_be() -> None:
    table = probe(loss_type="none_such")
    assert one(table, "configuration") == one(table, "loss_type=none_such") == REFUSED
    found = foresee(Facts(stack=table))
    assert found.rules == ("DS111",)
    assert "none_such" in found[0].evidence and found[0].severity == "critical"


def test_a_loss_type_that_the_oracle_does_not_know_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL of the future: it trains on a loss type that no oracle here knows."""
    real = GRPOTrainer._compute_loss

    def newer(self: Any, model: Any, inputs: Any) -> Any:
        known, self.loss_type = self.loss_type, "dapo" if self.loss_type == "newer" else self.loss_type
        loss = real(self, model, inputs)
        self.loss_type = known
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", newer)
    table = probe(loss_type="newer")
    row = table.find("loss_type=newer", "reference")
    assert row is not None and row.status == "unavailable" and "oracle" in row.message
    assert foresee(Facts(stack=table)).rules == ()


def test_what_is_no_grpo_is_refused() -> None:
    with pytest.raises(UsageError, match="GRPO"):
        probe_stack(Settings(trainer="reward"))
    with pytest.raises(UnsupportedTrainerError):
        probe_stack(trainer=object())


def test_several_processes_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    table = probe_stack()
    assert {row.status for row in table.rows} == {"unavailable"}
    assert "several processes" in table.rows[0].message


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss")
def test_without_liger_its_path_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    table = probe(use_liger_kernel=True, use_vllm=True)
    told = {row.status: row.message for row in table.rows if row.path == "liger"}
    assert set(told) == {"unavailable"}
    assert "liger_kernel" in told["unavailable"]
    assert one(table, "is_correction") == HONOURED
    assert foresee(Facts(stack=table)).rules == ()


@pytest.mark.parametrize("liger", [True, False])
def test_the_trainers_tools_are_looked_at(tmp_path: Any, liger: bool) -> None:
    with trainer(tmp_path, liger=liger and HAS_LIGER_LOSS, tools=True) as made:
        found = foresee(Facts(stack=probe_stack(trainer=made)))
    assert ("DS104" in found.rules) == (liger and IS_SEED_STACK)


@pytest.mark.parametrize(("arch", "feature"), [("gemma2", "logit_softcap"), ("cohere", "logit_scale")])
def test_the_trainers_own_head_is_looked_at(tmp_path: Any, arch: str, feature: str) -> None:
    with trainer(tmp_path, arch=arch, liger=HAS_LIGER_LOSS) as made:
        table = probe_stack(trainer=made)
    row = table.find(feature)
    assert row is not None and row.in_use
    assert {r.feature for r in table.rows if r.in_use and r.feature in HEADS} == {feature}
    found = foresee(Facts(stack=table))
    assert ("DS107" in found.rules) == HAS_LIGER_LOSS


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="TRL 1.16 refuses an adapter on the head")
def test_an_adapter_on_the_trainers_head_is_found(tmp_path: Any) -> None:
    from peft import LoraConfig, get_peft_model

    def wrap(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"]))

    with trainer(tmp_path, liger=True, wrap=wrap) as made:
        table = probe_stack(trainer=made)
    assert "DS108" in foresee(Facts(stack=table)).rules


# -- nothing is left behind ------------------------------------------------------------------------------------------


def test_the_process_is_left_as_it_was() -> None:
    reset_accelerate()
    mine = Accelerator(cpu=True)
    shared = [dict(c._shared_state) for c in (AcceleratorState, PartialState)]
    modules = [dict(vars(m)) for m in (modeling_qwen2, modeling_gemma2)]
    environment, threads = dict(os.environ), torch.get_num_threads()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    probe_stack()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.array_equal(numpy.random.get_state()[1], states[2][1])
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads
    assert [dict(c._shared_state) for c in (AcceleratorState, PartialState)] == shared
    assert mine.device.type == "cpu" and mine.num_processes == 1
    assert [dict(vars(m)) for m in (modeling_qwen2, modeling_gemma2)] == modules
    reset_accelerate()


def test_the_trainer_is_only_read(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
        state, metrics = torch.get_rng_state(), {k: dict(v) for k, v in made._metrics.items()}
        probe_stack(trainer=made)
        assert torch.equal(torch.get_rng_state(), state)
        assert {k: dict(v) for k, v in made._metrics.items()} == metrics
        assert all(p.grad is None and torch.equal(p, before[n]) for n, p in made.model.named_parameters())
        assert made.accelerator.num_processes == 1
        made.train()  # it still trains


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    probe_stack()
    assert capfd.readouterr() == ("", "")
