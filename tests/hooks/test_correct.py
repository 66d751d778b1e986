"""The correct mode: the real trainer trains on the configured loss, whatever fused path its settings name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.errors import UnsupportedTrainerError, UsageError
from driftscope.hooks.environment import ToolEnvironmentTrainer
from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, IS_SEED_STACK, alerts_of, steps_of, trainer
from tests.hooks.test_capture import lora
from tests.hooks.test_head_transforms import adapted

SETTINGS: dict[str, Any] = {"spectrum_every": 1, "deep_every": 1, "console": False, "report": False}
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"gradient_accumulation_steps": 4},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "beta": {"beta": 0.1, "use_bias_correction_kl": True},
    "off-policy": {"num_iterations": 2},
    "temperature": {"temperature": 0.7},
    "truncated": {"top_p": 0.9, "vllm_importance_sampling_mode": "token_truncate"},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "peft": {"wrap": lora},
    "peft reentrant": {
        "wrap": lora,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "softcap": {"arch": "gemma2"},
    "scale": {"arch": "cohere"},
    "tied": {"model_config": {"tie_word_embeddings": True}},
    "tools": {"trainer_class": ToolEnvironmentTrainer, "tools": True, "max_completion_length": 24},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "entropy bonus": {"entropy_coef": 0.05},
}
NEW = {"luspo", "vespo", "entropy bonus"}  # losses and terms that TRL 0.27 lacks


def refused_with_liger(case: str) -> bool:
    return case in {"sequence level", "entropy quantile", "off-policy mask", "luspo", "vespo", "entropy bonus"}


@pytest.mark.parametrize("case", CASES)
def test_the_configured_loss_is_what_trains(tmp_path: Any, case: str) -> None:
    if IS_SEED_STACK and case in NEW:
        pytest.skip("this TRL lacks the term")
    liger = HAS_LIGER_LOSS and not refused_with_liger(case)
    with trainer(tmp_path / "corrected", liger=liger, **CASES[case]) as made:
        scope = attach(made, tmp_path / "run", mode="correct", **SETTINGS)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
        corrected = {name: p.detach().clone() for name, p in made.model.named_parameters()}
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    for record in steps_of(tmp_path / "run"):
        assert record.live == "corrected"
        assert record.residual < 1e-5
        assert record.paths["corrected"].coef_error < 1e-5
        assert record.gap.candidate == "corrected"
        if record.paths["reference"].hidden_grad_norm > 0:  # with every token clipped there is no ratio
            assert record.gap.grad_norm_ratio == pytest.approx(1.0, abs=1e-5)
        assert record.causes == []
    loss_rules = {a.rule for a in alerts_of(tmp_path / "run") if a.rule < "DS2"}
    assert loss_rules == set()
    with trainer(tmp_path / "reference", **CASES[case]) as made:
        made.train()
        for name, p in made.model.named_parameters():
            torch.testing.assert_close(p.detach(), corrected[name], rtol=2e-3, atol=2e-4)
        expected = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, abs=2e-4)


@pytest.mark.skipif(not IS_SEED_STACK, reason="TRL 1.16 refuses an adapter on the head")
def test_an_adapter_on_the_head(tmp_path: Any) -> None:
    with trainer(tmp_path, liger=True, wrap=adapted, use_vllm=False, loss_type="grpo") as made:
        scope = attach(made, tmp_path / "run", mode="correct", **SETTINGS)
        before = {n: p.detach().clone() for n, p in made.model.named_parameters() if "lm_head.lora_A" in n}
        made.train()
        assert scope.guard.off == {}
        scope.detach()
        after = dict(made.model.named_parameters())
        assert before
        assert all(not torch.equal(p, after[n]) for n, p in before.items())
    for record in steps_of(tmp_path / "run"):
        assert record.paths["corrected"].coef_error < 1e-5
        assert record.causes == []


def test_a_random_head_is_refused(tmp_path: Any) -> None:
    from peft import LoraConfig, get_peft_model

    def dropped(model: Any) -> Any:
        config = LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1, task_type="CAUSAL_LM")
        return get_peft_model(model, config)

    if not IS_SEED_STACK:
        pytest.skip("TRL 1.16 refuses an adapter on the head")
    with trainer(tmp_path, wrap=dropped, use_vllm=False) as made:
        made.model.train()
        with pytest.raises(UnsupportedTrainerError, match="lora_dropout"):
            attach(made, tmp_path / "run", mode="correct", **SETTINGS)


def test_evaluation(tmp_path: Any) -> None:
    """An evaluation between steps runs on the corrected loss too, and leaves the training as it is."""
    results = []
    for mode in ("watch", "correct"):
        with trainer(tmp_path / mode, loss_type="grpo", per_device_eval_batch_size=4) as made:
            made.eval_dataset = made.train_dataset.select(range(4))
            scope = attach(made, tmp_path / mode / "run", mode=mode, **SETTINGS)
            made.train()
            results.append(made.evaluate()["eval_loss"])
            scope.detach()
    assert results[1] == pytest.approx(results[0], abs=1e-5)


def test_detach_gives_the_trainer_back(tmp_path: Any) -> None:
    with trainer(tmp_path) as made:
        before = set(made.__dict__)
        scope = attach(made, tmp_path / "run", mode="correct", console=False)
        assert "_get_per_token_logps_and_entropies" in made.__dict__
        scope.detach()
        assert set(made.__dict__) == before
        made.train()


def test_the_callback_takes_the_mode(tmp_path: Any) -> None:
    from driftscope.hooks.callback import DriftscopeCallback

    callback = DriftscopeCallback(tmp_path / "run", mode="correct", **SETTINGS)
    with trainer(tmp_path, liger=HAS_LIGER_LOSS, callbacks=[callback]) as made:
        made.train()
        assert "_get_per_token_logps_and_entropies" not in made.__dict__
    assert {r.live for r in steps_of(tmp_path / "run")} == {"corrected"}


def test_unknown_mode(tmp_path: Any) -> None:
    with trainer(tmp_path) as made, pytest.raises(UsageError, match="mode"):
        attach(made, tmp_path / "run", mode="repair")
