"""What capture must cope with: accumulation, checkpointing, autocast, PEFT, padding, uneven lengths, masked rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftscope.hooks.demo import even_words
from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, IS_SEED_STACK, alerts_of, steps_of, trainer

LIVE = [False, True] if HAS_LIGER_LOSS else [False]


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "peft": {"wrap": lora},
    "peft reentrant": {
        "wrap": lora,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "llama": {"arch": "llama"},
    "uneven": {"model_config": {"vocab": 24}, "temperature": 2.0},
    "tied": {"model_config": {"tie_word_embeddings": True}},
    "masked rows": {"mask_truncated_completions": True, "model_config": {"vocab": 24}, "temperature": 2.0},
    "off-policy": {"num_iterations": 2},
    "sequence level": {"importance_sampling_level": "sequence"},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "sapo": {"loss_type": "sapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "no clipping": {"max_grad_norm": 0.0},
}
REFUSED = {"sequence level", "off-policy mask", "entropy quantile", "sapo", "cispo"}


@pytest.mark.parametrize("liger", LIVE)
@pytest.mark.parametrize("case", CASES)
def test_the_live_backward_is_measured(tmp_path: Any, case: str, liger: bool) -> None:
    if liger and case in REFUSED:
        pytest.skip(f"TRL or Liger refuses {case!r} on the fused path")
    if case == "reentrant" and not IS_SEED_STACK:
        pytest.skip("transformers 5 needs input gradients for reentrant checkpointing without PEFT")
    with trainer(tmp_path, liger=liger, **CASES[case]) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False, report=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    records = [r for r in steps_of(tmp_path / "run") if r.tokens]
    assert records
    for record in records:
        assert record.residual < 1e-5
        assert record.unexplained.share < 0.01
        if not liger:
            assert record.paths["reference"].coef_error < 1e-4
            assert record.paths["liger"].note or record.paths["liger"].coef_error is not None
        elif record.paths["liger"].fused_call_error is not None:
            assert record.paths["liger"].fused_call_error < 1e-4
    for record in records:
        live = record.paths[record.live]
        if live.param_grad_norm is not None and record.live_grad_norm is not None:
            assert live.param_grad_norm == pytest.approx(record.live_grad_norm, rel=1e-4)
    assert any(r.paths[r.live].param_grad_norm is not None for r in records)
    assert not {"DS109", "DS110", "DS112", "DS901"} & {a.rule for a in alerts_of(tmp_path / "run")}


@pytest.mark.parametrize("liger", LIVE)
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "pure"])
def test_bf16(tmp_path: Any, liger: bool, pure: bool) -> None:
    """The tolerance follows the rounding that the run itself shows; an honest bf16 run has no cause and no warning."""
    with trainer(
        tmp_path,
        liger=liger,
        loss_type="grpo",
        bf16=True,
        dtype=torch.bfloat16 if pure else None,
        vllm_importance_sampling_correction=False,  # the engine computes in float32: with it the ratio is not 1
    ) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False, report=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    for record in steps_of(tmp_path / "run"):
        assert 1e-5 < record.residual < 0.02
        assert record.causes == []
        assert record.gap.noise_floor > 1e-4
        assert record.gap.grad_norm_ratio == pytest.approx(1.0, abs=0.02)
    assert not {a.rule for a in alerts_of(tmp_path / "run") if a.severity != "info"}


def test_batches_are_padded_and_uneven(tmp_path: Any) -> None:
    """The cases above do meet left padding and uneven lengths."""
    seen: list[dict[str, Any]] = []
    with trainer(tmp_path, **CASES["uneven"], max_steps=3) as made:
        original = made.compute_loss

        def look(model: Any, inputs: Any, **kwargs: Any) -> Any:
            seen.append(inputs)
            return original(model, inputs, **kwargs)

        made.compute_loss = look
        made.train()
    assert any(bool((i["prompt_mask"][:, 0] == 0).any()) for i in seen)
    assert any(len(set(i["completion_mask"].sum(-1).tolist())) > 1 for i in seen)


def test_all_tokens_masked(tmp_path: Any) -> None:
    """A batch whose mask is all zero is recorded as such, and neither fails nor counts as fine."""
    with trainer(tmp_path, mask_truncated_completions=True, max_completion_length=4) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    records = [r for r in steps_of(tmp_path / "run") if r.tokens == 0]
    assert records
    assert all("trains on no token" in r.unavailable["head"] for r in records)
    assert "DS402" in {a.rule for a in alerts_of(tmp_path / "run")}


def test_reward_none(tmp_path: Any) -> None:
    """A reward function that returns None for some completions: TRL copes, and so do the records."""

    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None if i % 2 else r for i, r in enumerate(even_words(completions))]

    with trainer(tmp_path, reward=[sometimes, even_words]) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False)
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    assert all(r.residual < 1e-5 for r in steps_of(tmp_path / "run"))
