"""A real vLLM engine under a real TRL trainer: what sets it apart is named first, and honest runs raise no alarm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.vllm.engine_runs import engine_run, lora, needs_vllm, quiet_upstream

pytestmark = [needs_vllm, quiet_upstream, pytest.mark.slow]
BF16, FP32 = torch.bfloat16, torch.float32


def spread(seen: Any) -> tuple[float, float, float]:
    """Least, mean and largest token ratio of a run."""
    tokens = [r.mismatch.raw.token for r in seen.records]
    return min(t.min for t in tokens), sum(t.mean for t in tokens) / len(tokens), max(t.max for t in tokens)


HONEST = {
    "fp32, T=0.6": ({"temperature": 0.6}, FP32, 1e-4, 1e-5),
    "bf16, T=1": ({}, BF16, 0.25, 0.01),
    "bf16, T=0.6": ({"temperature": 0.6}, BF16, 0.8, 0.01),
    "LoRA, num_iterations=2": ({"num_iterations": 2, "wrap": lora, "learning_rate": 1e-2}, FP32, 1e-4, 1e-5),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("row", HONEST)
def test_honest_rows_raise_no_alarm(tmp_path: Any, row: str, seed: int):
    settings, dtype, width, bias = HONEST[row]
    seen = engine_run(tmp_path, dtype=dtype, seed=seed, **settings)
    low, mean, high = spread(seen)
    assert 1 - width < low <= 1 <= high < 1 + width
    assert mean == pytest.approx(1.0, abs=bias)
    assert not seen.rules
    assert all(r.canary.tokenizer == [] and not r.violations for r in seen.records)
    assert set(seen.first_causes) == {"engine_noise"}
    assert {r.canary.agrees_with for r in seen.records} == {"current"}
    if dtype == BF16:  # bfloat16 is noise of the engine's number format, and is seen as that
        assert low < 0.95
        assert high > 1.05
        assert all("coarser number format" in r.is_ratio.causes[0].detail for r in seen.records)


@pytest.mark.parametrize(("dtype", "heat", "width"), [(FP32, 1.0, 0.0025), (BF16, 0.6, 0.4)])
def test_truncated_sampling_is_the_first_cause(tmp_path: Any, dtype: torch.dtype, heat: float, width: float):
    seen = engine_run(tmp_path, dtype=dtype, top_p=0.8, temperature=heat)
    low, mean, high = spread(seen)
    assert 0.8 - width < low < high < 0.8 + width
    assert mean == pytest.approx(0.803, abs=0.008)
    assert set(seen.first_causes) == {"truncated_support"}
    assert "DS201" in seen.rules
    if dtype == FP32:
        assert all(r.is_ratio.causes[0].share == pytest.approx(1.0, abs=0.01) for r in seen.records)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_the_kept_mass_explains_the_mean_log_ratio_within_a_percent(tmp_path: Any, mode: str):
    seen = engine_run(tmp_path, top_p=0.8, vllm_importance_sampling_mode=mode)
    for record in seen.records:
        assert record.is_ratio.truncated_support_share == pytest.approx(1.0, abs=0.01)
        assert record.is_ratio.kept_mass == pytest.approx(0.8, abs=0.005)
        if mode == "sequence_mask":
            assert record.mismatch.applied.product.mean < 0.06
            product = next(c for c in record.is_ratio.causes if c.id == "sequence_product")
            assert product.factor < 0.1


def test_a_weight_sync_that_is_off_is_named_within_two_steps(tmp_path: Any):
    seen = engine_run(tmp_path, stale=True, steps=4)
    assert seen.first_causes[:2] == ["engine_noise", "stale_weights"]
    assert set(seen.first_causes[1:]) == {"stale_weights"}
    assert seen.rules >= {"DS207"}
    assert not seen.rules & {"DS208", "DS209", "DS210"}
    low, _, high = spread(seen)
    assert low < 0.75
    assert high > 1.3


def test_a_stale_lm_head_is_named_within_two_steps(tmp_path: Any):
    seen = engine_run(tmp_path, stale=["lm_head"], steps=4)
    assert set(seen.first_causes[1:]) == {"stale_module"}
    assert all(r.canary.stale_modules == ["lm_head"] for r in seen.records[1:])
    assert seen.rules >= {"DS208"}
    assert not seen.rules & {"DS207", "DS209", "DS210"}


def test_an_adapter_that_was_not_loaded_is_named_within_two_steps(tmp_path: Any):
    seen = engine_run(tmp_path, stale=True, wrap=lora, learning_rate=1e-2, steps=3)
    assert set(seen.first_causes[1:]) == {"adapter_missing"}
    assert seen.rules >= {"DS209"}
    assert not seen.rules & {"DS207", "DS208", "DS210"}


def test_a_tokenizer_that_the_engine_reads_otherwise_is_named(tmp_path: Any):
    """transformers 5 loads a word-level tokenizer of a Qwen2 directory as byte-level BPE: the engine reads nothing."""
    seen = engine_run(tmp_path, arch="qwen2", steps=1)
    assert any(words.startswith("a prompt of") for words in seen.records[0].canary.tokenizer)
    assert seen.records[0].canary.agrees_with == "current"  # TRL sends token ids here, so the run is sound
    assert not seen.rules
