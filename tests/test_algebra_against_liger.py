"""The loss algebra against the installed Liger's own ``ppo_loss_fn``, with the spec that Liger realises.

Until 0.7 the function takes log-probs over the vocabulary and gathers the sampled tokens; a vocabulary of one token
feeds it log-probs that are already gathered. From 0.8 it takes them directly. No Liger version applies a tool mask,
and the accumulation divisor is the trainer's.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from driftscope.algebra import coefficients, importance_ratio
from driftscope.batch import TokenBatch
from driftscope.spec import LossSpec
from tests.algebra_batches import MAX_LENGTH, random_batch

pytest.importorskip("liger_kernel")
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

ROUNDING = 1e-12
LOSS_FN = LigerFusedLinearGRPOFunction.ppo_loss_fn
SOURCE = inspect.getsource(LOSS_FN)
ARGUMENTS = inspect.signature(LOSS_FN).parameters
TAKES_GATHERED_LOGPS = "per_token_logps" in ARGUMENTS
TOKEN_LEVEL_ONLY = ("cispo", "sapo", "vespo")

NORMALIZERS = {
    "grpo": "sequence", "sapo": "sequence", "bnpo": "micro_batch", "dr_grpo": "max_length", "dapo": "micro_batch",
    "cispo": "micro_batch", "vespo": "micro_batch", "luspo": "length_weighted",
}  # fmt: skip
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "sequence": {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    "kl": {"beta": 0.3},
    "kl_sequence": {"beta": 0.3, "importance_sampling_level": "sequence"},
    "delta": {"delta": 1.3},
    "kl_corrected": {"beta": 0.3, "kl_bias_correction": True, "delta": 1.3},
    "kl_corrected_sequence": {"beta": 0.3, "kl_bias_correction": True, "importance_sampling_level": "sequence"},
    "token_truncate": {"is_correction": True, "is_mode": "token_truncate", "is_cap": 1.1},
    "token_mask": {"is_correction": True, "is_mode": "token_mask", "is_cap": 1.1, "beta": 0.2},
    "sequence_mask": {"is_correction": True, "is_mode": "sequence_mask", "is_cap": 1.2},
    "generation_batch": {"normalizer": "generation_batch"},
}


@pytest.fixture(autouse=True)
def _float64_constants():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def require(spec: LossSpec) -> None:
    """Skip what the installed Liger has not got."""
    asked = {
        f"loss_type={spec.loss_type!r}": f'"{spec.loss_type}"' in SOURCE,
        "a ratio of the sampling engine": not spec.is_correction or "vllm_is_ratio" in ARGUMENTS,
        "delta": spec.delta is None or "delta" in ARGUMENTS,
        "KL bias correction": not spec.kl_bias_correction or "use_bias_correction_kl" in ARGUMENTS,
        "the generation batch's normaliser": spec.normalizer != "generation_batch"
        or "num_items_in_batch" in ARGUMENTS,
    }
    missing = [name for name, there in asked.items() if not there]
    if missing:
        pytest.skip(f"this Liger has no {', '.join(missing)}")
    if spec.importance_sampling_level == "sequence" and spec.loss_type in TOKEN_LEVEL_ONLY:
        pytest.skip(f"Liger refuses a sequence-level ratio for {spec.loss_type!r}")
    if spec.normalizer == "generation_batch" and spec.loss_type not in ("dapo", "cispo", "vespo"):
        pytest.skip(f"{spec.loss_type!r} does not use num_items_in_batch")


def liger_coefficients(spec: LossSpec, batch: TokenBatch):
    """Liger's loss and dL/dlogp, by autograd through its own ``ppo_loss_fn``."""
    logps_BT = batch.logps_BT.clone().requires_grad_()
    optional = {
        "delta": spec.delta, "use_bias_correction_kl": spec.kl_bias_correction,
        "sapo_temperature_pos": spec.sapo_temperature_pos, "sapo_temperature_neg": spec.sapo_temperature_neg,
        "vespo_k_pos": spec.vespo_k_pos, "vespo_lambda_pos": spec.vespo_lambda_pos,
        "vespo_k_neg": spec.vespo_k_neg, "vespo_lambda_neg": spec.vespo_lambda_neg,
        "vllm_is_ratio": importance_ratio(spec, batch) if spec.is_correction else None,
        "num_items_in_batch": batch.num_items_in_batch if spec.normalizer == "generation_batch" else None,
    }  # fmt: skip
    if TAKES_GATHERED_LOGPS:
        inputs = {"per_token_logps": logps_BT}
    else:
        inputs = {
            "log_probs": logps_BT.unsqueeze(-1),
            "selected_token_ids": torch.zeros_like(batch.completion_mask_BT),
        }
    loss, _ = LOSS_FN(
        **inputs,
        attention_mask=batch.completion_mask_BT,
        advantages=batch.advantages,
        full_attention_mask=batch.completion_mask_BT,
        ref_per_token_logps=batch.ref_logps_BT,
        old_per_token_logps=batch.old_logps_BT,
        epsilon_low=spec.epsilon_low,
        epsilon_high=spec.epsilon_high,
        beta=spec.beta,
        loss_type=spec.loss_type,
        max_completion_length=MAX_LENGTH,
        importance_sampling_level=spec.importance_sampling_level,
        **{name: value for name, value in optional.items() if name in ARGUMENTS},
    )
    return loss.item(), *torch.autograd.grad(loss, [logps_BT])


def make_spec(loss_type: str, **options) -> LossSpec:
    options.setdefault("normalizer", NORMALIZERS[loss_type])
    return LossSpec(loss_type=loss_type, max_completion_length=MAX_LENGTH, **options)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", NORMALIZERS)
def test_loss_and_coefficients(loss_type, option, on_policy):
    spec = make_spec(loss_type, **OPTIONS[option])
    require(spec)
    for seed in range(3):
        batch = random_batch(seed, on_policy=on_policy)
        loss, coefs_BT = liger_coefficients(spec, batch)
        ours = coefficients(spec, batch)
        assert ours.loss == pytest.approx(loss, rel=ROUNDING, abs=1e-14)
        torch.testing.assert_close(ours.logps_BT, coefs_BT, rtol=ROUNDING, atol=ROUNDING * coefs_BT.abs().max().item())


def test_liger_never_sees_the_tool_mask():
    """The path's spec says ``tool_mask=False``: tool results then carry coefficients and count in the normaliser."""
    spec = make_spec("dapo")
    batch = random_batch(0, tools=True)
    _, coefs_BT = liger_coefficients(spec, batch)
    assert coefs_BT[0, 2:5].any()
    torch.testing.assert_close(coefficients(spec, batch).logps_BT, coefs_BT, rtol=ROUNDING, atol=1e-15)
    assert not coefficients(spec.replace(tool_mask=True), batch).logps_BT[0, 2:5].any()


def test_token_level_luspo_trains_on_padding():
    """``length_weighted`` averages over all positions: with a token-level ratio padding gets coefficients upstream."""
    spec = make_spec("luspo")
    require(spec)
    batch = random_batch(0)
    _, coefs_BT = liger_coefficients(spec, batch)
    assert coefs_BT[1, 4:].any()  # the sequence has 4 tokens
    assert not coefficients(spec.replace(normalizer="sequence_sum"), batch).logps_BT[1, 4:].any()
