"""The loss algebra on its own: closed forms, finite differences, linearity, dtypes, errors."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from driftscope.algebra import coefficients, importance_ratio, normalizer_value, policy_mask, raw_log_ratio_BT
from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.masks import counts
from driftscope.spec import LossSpec, Normalizer
from tests.algebra_batches import ADVANTAGES, LENGTHS, MAX_LENGTH, NUM_ITEMS, RANK_MEAN_TOKENS, B, T, random_batch

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
NORMALIZERS = Normalizer.__args__
TRAINED = sum(LENGTHS)
DIFFERENCE = 1e-7  # of a central difference with step 1e-6 in float64, relative to the largest coefficient
FLOAT32 = 2e-6  # relative L2 error of float32 coefficients


def spec_of(loss_type: str = "dapo", **options) -> LossSpec:
    return LossSpec(loss_type=loss_type, max_completion_length=MAX_LENGTH, **options)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", [n for n in NORMALIZERS if n not in ("sequence", "length_weighted")])
def test_on_policy_coefficient_is_advantage_over_normalizer(normalizer):
    spec = spec_of(normalizer=normalizer, accumulation_steps=4, steps_per_generation=8, num_processes=2)
    expected = {
        "micro_batch": TRAINED * 4,
        "micro_batch_over_ranks": RANK_MEAN_TOKENS[1] * 4,
        "max_length": B * MAX_LENGTH * 4,
        "generation_batch": NUM_ITEMS / 2,
        "generation_batch_rescaled": NUM_ITEMS / 2 * 4 / 8,
        "sequence_sum": B * 4,
    }[normalizer]
    batch = random_batch(0, on_policy=True)
    result = coefficients(spec, batch)
    assert normalizer_value(spec, batch) == result.normalizer == expected
    hand_BT = -torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None] * batch.completion_mask_BT / expected
    torch.testing.assert_close(result.logps_BT, hand_BT, rtol=1e-14, atol=0.0)


def test_sequence_normalizers_have_no_single_divisor():
    batch = random_batch(0, on_policy=True)
    for loss_type, normalizer in (("grpo", "sequence"), ("luspo", "length_weighted")):
        assert normalizer_value(spec_of(loss_type, normalizer=normalizer), batch) is None
    coefs_BT = coefficients(spec_of("grpo", accumulation_steps=2), batch).logps_BT
    for b, (length, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        for t in range(length):
            assert coefs_BT[b, t].item() == pytest.approx(-advantage / (length * B * 2), rel=1e-14)


def test_tool_mask_leaves_the_divisor():
    batch = random_batch(0, tools=True)
    assert normalizer_value(spec_of("bnpo"), batch) == TRAINED
    assert normalizer_value(spec_of("bnpo", tool_mask=True), batch) == TRAINED - 4
    assert policy_mask(spec_of(), batch).sum() == TRAINED
    assert policy_mask(spec_of(tool_mask=True), batch).sum() == TRAINED - 4
    without = replace(batch, tool_mask_BT=None)
    assert policy_mask(spec_of(tool_mask=True), without).sum() == TRAINED


def one_token(log_ratio: float, advantage: float, **options) -> float:
    """dL/dlogp of one token with normaliser 1."""
    batch = TokenBatch(
        logps_BT=torch.tensor([[-1.0]], dtype=torch.float64),
        completion_mask_BT=torch.ones(1, 1),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        old_logps_BT=torch.tensor([[-1.0 - log_ratio]], dtype=torch.float64),
        ref_logps_BT=torch.tensor([[-0.7]], dtype=torch.float64),
        entropies_BT=torch.ones(1, 1),
    )
    return coefficients(LossSpec(**{"loss_type": "bnpo", **options}), batch).logps_BT.item()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "options", "expected"),
    [
        (0.1, 2.0, {}, -2.0 * math.exp(0.1)),  # inside the clip range
        (0.3, 2.0, {}, 0.0),  # over it, pushed further up: clipped
        (0.3, -2.0, {}, 2.0 * math.exp(0.3)),  # over it, pushed back: alive
        (-0.3, -2.0, {}, 0.0),  # under it, pushed further down: clipped
        (1.0, -2.0, {"delta": 2.0}, 0.0),  # over delta: dead in both directions
        (0.5, -2.0, {"delta": 2.0}, 2.0 * math.exp(0.5)),
        (1.0, 2.0, {"loss_type": "cispo", "normalizer": "micro_batch", "epsilon_high": 1.5}, -2.0 * 1.5),
        (0.2, 2.0, {"loss_type": "cispo", "normalizer": "micro_batch", "epsilon_high": 1.5}, -2.0 * math.exp(0.2)),
        (0.0, 2.0, {"loss_type": "sapo", "sapo_temperature_pos": 1.7}, -2.0),  # 4 sigma'(0) = 1
        (0.2, -2.0, {"loss_type": "vespo", "normalizer": "micro_batch"},
         2.0 * math.exp(2.0 + 3.0 * 0.2 - 2.0 * math.exp(0.2))),
        (0.0, 0.0, {"beta": 0.5}, 0.5 * (1.0 - math.exp(0.3))),  # d/dlogp of k3
        (0.0, 0.0, {"beta": 0.5, "kl_bias_correction": True},
         0.5 * ((1.0 - math.exp(0.3)) + (math.exp(0.3) - 0.3 - 1.0))),
    ],
)  # fmt: skip
def test_coefficient_of_one_token(log_ratio, advantage, options, expected):
    assert one_token(log_ratio, advantage, **options) == pytest.approx(expected, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[0.5, 1.5, 1.0]]),
        ("token_mask", [[0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[0.75]]),
        ("sequence_mask", [[0.75]]),
    ],
)
def test_importance_ratio_by_hand(mode, expected):
    """Raw ratios 0.25 and 3 and a tool result that must not count, floor 0.5, cap 1.5."""
    ratios = torch.tensor([[0.25, 3.0, 100.0]], dtype=torch.float64)
    batch = TokenBatch(
        logps_BT=torch.zeros(1, 3, dtype=torch.float64),
        completion_mask_BT=torch.ones(1, 3),
        advantages=torch.ones(1),
        sampling_logps_BT=-torch.log(ratios),
        tool_mask_BT=torch.tensor([[1, 1, 0]]),
    )
    spec = LossSpec(is_correction=True, is_mode=mode, is_cap=1.5, is_floor=0.5)
    torch.testing.assert_close(importance_ratio(spec, batch), torch.tensor(expected, dtype=torch.float64))
    hand_BT = torch.tensor([[math.log(0.25), math.log(3.0), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(raw_log_ratio_BT(spec, batch), hand_BT)
    unbounded = importance_ratio(spec.replace(is_cap=None, is_floor=None, is_mode="token_mask"), batch)
    torch.testing.assert_close(unbounded, torch.tensor([[0.25, 3.0, 1.0]], dtype=torch.float64))


def test_unscored_token_has_ratio_one():
    batch = random_batch(0)
    batch.sampling_logps_BT[0, 1] = torch.nan
    spec = spec_of(is_correction=True, is_mode="token_truncate")
    assert importance_ratio(spec, batch)[0, 1] == 1.0
    assert coefficients(spec, batch).logps_BT.isfinite().all()


def test_given_ratio_wins_and_scales():
    spec = spec_of(is_correction=True)
    batch = random_batch(0)
    plain_BT = coefficients(spec.replace(is_correction=False), batch).logps_BT
    for shape in ((B,), (B, 1), (B, T)):
        given = replace(batch, is_ratio=torch.full(shape, 0.01, dtype=torch.float64), sampling_logps_BT=None)
        torch.testing.assert_close(coefficients(spec, given).logps_BT, 0.01 * plain_BT, rtol=1e-13, atol=0.0)
        ignored_BT = coefficients(spec.replace(is_correction=False), given).logps_BT
        torch.testing.assert_close(ignored_BT, plain_BT, rtol=0.0, atol=0.0)


# --- derivatives -----------------------------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, LossSpec] = {
    "clip": spec_of(delta=1.5, tool_mask=True, is_correction=True, is_mode="token_truncate", is_cap=1.2),
    "sequence_kl": spec_of("grpo", importance_sampling_level="sequence", beta=0.4, kl_bias_correction=True),
    "sapo": spec_of("sapo", beta=0.1, off_policy_threshold=0.05, is_correction=True),
    "luspo": spec_of("luspo", importance_sampling_level="sequence", beta=0.1, accumulation_steps=3),
    "luspo_padding": spec_of("luspo", normalizer="length_weighted", is_correction=True, is_mode="token_mask"),
    "entropy": spec_of("bnpo", entropy_coef=0.3, top_entropy_quantile=0.5, accumulation_steps=2),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_against_central_differences(name):
    spec, step = DIFFERENTIABLE[name], 1e-6
    batch = random_batch(3, tools=True)
    result = coefficients(spec, batch)
    pairs = [("logps_BT", result.logps_BT)]
    if spec.entropy_coef:
        pairs.append(("entropies_BT", result.entropies_BT))
    for field, coefs_BT in pairs:
        numeric_BT = torch.zeros_like(coefs_BT)
        for index in torch.cartesian_prod(torch.arange(B), torch.arange(T)).tolist():
            losses = []
            for sign in (1, -1):
                moved = getattr(batch, field).clone()
                moved[tuple(index)] += sign * step
                losses.append(coefficients(spec, replace(batch, **{field: moved})).loss)
            numeric_BT[tuple(index)] = (losses[0] - losses[1]) / (2 * step)
        assert coefs_BT.any()
        assert (numeric_BT - coefs_BT).abs().max() <= DIFFERENCE * coefs_BT.abs().max()


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_detached_weights_get_no_gradient(loss_type):
    """Coefficients of these two are weight * advantage / normaliser, read off from the loss itself: L = sum c logp."""
    spec = spec_of(loss_type, epsilon_high=1.2)
    batch = random_batch(4)
    result = coefficients(spec, batch)
    assert result.loss == pytest.approx((result.logps_BT * batch.logps_BT).sum().item(), rel=1e-13)


# --- accumulation ----------------------------------------------------------------------------------------------------


def rows(batch: TokenBatch, index: slice) -> TokenBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{k: v[index] for k, v in values.items() if isinstance(v, torch.Tensor)})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_is_inverse_in_the_accumulation_steps(loss_type):
    spec = spec_of(loss_type, beta=0.1, entropy_coef=0.1, steps_per_generation=1)
    batch = random_batch(5)
    one, four = coefficients(spec, batch), coefficients(spec.replace(accumulation_steps=4), batch)
    assert four.loss * 4 == pytest.approx(one.loss, rel=1e-13)
    torch.testing.assert_close(four.logps_BT * 4, one.logps_BT, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(four.entropies_BT * 4, one.entropies_BT, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_which_normalizers_make_micro_batches_add_up(normalizer):
    """Halves of a batch add up to the whole unless a micro-batch is divided by its own token count."""
    spec = spec_of(normalizer=normalizer, steps_per_generation=2, accumulation_steps=2)
    batch = random_batch(6)
    if normalizer == "generation_batch":
        whole = coefficients(spec, batch).logps_BT
    else:
        whole = coefficients(spec.replace(accumulation_steps=1, steps_per_generation=1), batch).logps_BT
    halves = torch.cat([coefficients(spec, rows(batch, half)).logps_BT for half in (slice(0, 3), slice(3, 6))])
    adds_up = torch.allclose(halves, whole, rtol=1e-12, atol=0.0)
    assert adds_up == (not normalizer.startswith("micro_batch"))


# --- dtypes, masks, side effects -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_float32_against_float64(loss_type):
    spec = spec_of(loss_type, beta=0.1, kl_bias_correction=True, is_correction=True, is_mode="token_truncate")
    batch = random_batch(7)
    exact, rounded = coefficients(spec, batch), coefficients(spec, batch, torch.float32)
    assert exact.logps_BT.dtype == torch.float64
    assert rounded.logps_BT.dtype == torch.float32
    assert 0.0 < relative_error(rounded.logps_BT.double(), exact.logps_BT) < FLOAT32
    assert rounded.normalizer == exact.normalizer


def test_long_sequences_are_counted_exactly_in_bfloat16():
    """bfloat16 holds integers only up to 256; the divisor must not round with the working dtype."""
    batch = TokenBatch(logps_BT=torch.zeros(1, 1001), completion_mask_BT=torch.ones(1, 1001), advantages=torch.ones(1))
    batch = batch.to(torch.bfloat16)
    assert normalizer_value(spec_of("bnpo"), batch) == 1001
    assert counts(batch.completion_mask_BT).tolist() == [1001]
    assert coefficients(spec_of("grpo"), batch, torch.bfloat16).logps_BT.dtype == torch.bfloat16


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_on_gives_zero(loss_type, normalizer):
    spec = spec_of(
        loss_type, normalizer=normalizer, beta=0.1, is_correction=True, top_entropy_quantile=0.5, entropy_coef=0.1,
        off_policy_threshold=0.1, importance_sampling_level="sequence",
    )  # fmt: skip
    batch = random_batch(8)
    batch = replace(batch, completion_mask_BT=torch.zeros(B, T), num_items_in_batch=0)
    result = coefficients(spec, batch)
    assert result.loss == 0.0
    assert torch.equal(result.logps_BT, torch.zeros(B, T, dtype=torch.float64))
    assert torch.equal(result.entropies_BT, torch.zeros(B, T, dtype=torch.float64))


def test_caller_is_left_alone():
    batch = random_batch(9)
    leaf = batch.logps_BT.clone().requires_grad_()
    spec = spec_of(entropy_coef=0.1, beta=0.1)
    with torch.no_grad():
        under_no_grad = coefficients(spec, replace(batch, logps_BT=leaf * 1.0))
    result = coefficients(spec, replace(batch, logps_BT=leaf * 1.0))
    assert torch.equal(under_no_grad.logps_BT, result.logps_BT)
    assert leaf.grad is None
    assert not batch.entropies_BT.requires_grad
    assert not result.logps_BT.requires_grad


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long, torch.float32])
def test_mask_dtype_does_not_matter(mask_dtype):
    spec = spec_of("bnpo", tool_mask=True, is_correction=True)
    batch = random_batch(10, tools=True)
    completion_mask_BT, tool_mask_BT = batch.completion_mask_BT.to(mask_dtype), batch.tool_mask_BT.to(mask_dtype)
    cast = replace(batch, completion_mask_BT=completion_mask_BT, tool_mask_BT=tool_mask_BT)
    assert torch.equal(coefficients(spec, cast).logps_BT, coefficients(spec, batch).logps_BT)
    assert torch.equal(importance_ratio(spec, cast), importance_ratio(spec, batch))
    assert normalizer_value(spec, cast) == normalizer_value(spec, batch)


OPTIONS_THAT_ACT: list[tuple[str, dict[str, object]]] = [
    ("dapo", {"epsilon_low": 0.4}), ("dapo", {"epsilon_high": 0.4}), ("dapo", {"delta": 1.5}),
    ("dapo", {"importance_sampling_level": "sequence"}), ("dapo", {"beta": 0.1}),
    ("dapo", {"is_correction": True, "is_mode": "token_truncate"}), ("dapo", {"tool_mask": True}),
    ("dapo", {"off_policy_threshold": 0.02}), ("dapo", {"top_entropy_quantile": 0.4}),
    ("dapo", {"normalizer": "micro_batch"}), ("sapo", {"sapo_temperature_pos": 2.0}),
    ("sapo", {"sapo_temperature_neg": 2.0}), ("vespo", {"vespo_k_pos": 1.0}), ("vespo", {"vespo_k_neg": 1.0}),
    ("vespo", {"vespo_lambda_pos": 1.0}), ("vespo", {"vespo_lambda_neg": 1.0}),
    ("vespo", {"is_correction": True, "is_mode": "token_truncate"}), ("cispo", {"epsilon_high": 1.1}),
]  # fmt: skip


@pytest.mark.parametrize(("loss_type", "options"), OPTIONS_THAT_ACT)
def test_every_option_changes_the_coefficients(loss_type, options):
    """Guards the comparisons with upstream: on these batches no option is idle."""
    base = spec_of(loss_type, **({"epsilon_high": 1.5} if loss_type == "cispo" else {}))
    batch = random_batch(0, tools=True)
    changed = coefficients(base.replace(**options), batch).logps_BT
    assert relative_error(changed, coefficients(base, batch).logps_BT) > 1e-3


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_caps_and_floors_act(mode):
    batch = random_batch(0)
    free = importance_ratio(spec_of(is_mode=mode, is_cap=None), batch)
    capped = importance_ratio(spec_of(is_mode=mode, is_cap=1.1), batch)
    floored = importance_ratio(spec_of(is_mode=mode, is_cap=None, is_floor=0.9), batch)
    assert 0 < (free != capped).sum() < free.numel()
    assert 0 < (free != floored).sum() < free.numel()


# --- trouble ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "missing", "words"),
    [
        ({"beta": 0.1}, "ref_logps_BT", ("beta=0.1", "reference", "ref_logps_BT")),
        ({"loss_type": "dr_grpo"}, None, ("dr_grpo", "max_completion_length")),
        ({"loss_type": "dapo"}, "num_items_in_batch", ("dapo", "num_items_in_batch", "micro_batch")),
        ({"normalizer": "generation_batch"}, "num_items_in_batch", ("generation_batch", "num_items_in_batch")),
        ({"entropy_coef": 0.1}, "entropies_BT", ("entropy_coef=0.1", "entropies_BT")),
        ({"top_entropy_quantile": 0.2}, "entropies_BT", ("top_entropy_quantile=0.2", "entropies_BT")),
        ({"is_correction": True}, "sampling_logps_BT", ("sequence_mask", "sampling_logps_BT", "is_correction=False")),
    ],
)
def test_missing_input_names_setting_and_remedy(options, missing, words):
    batch = random_batch(0)
    if missing is not None:
        batch = replace(batch, **{missing: None})
    with pytest.raises(UsageError) as error:
        coefficients(LossSpec(**options), batch)
    for word in words:
        assert word in str(error.value)


def test_shapes_that_would_broadcast_are_refused():
    batch = random_batch(0)
    with pytest.raises(UsageError, match="old_logps_BT has shape"):
        coefficients(spec_of(), replace(batch, old_logps_BT=batch.old_logps_BT[:1]))
    with pytest.raises(UsageError, match="advantages has shape"):
        coefficients(spec_of(), replace(batch, advantages=torch.ones(T)))
    with pytest.raises(UsageError, match="works on"):
        coefficients(spec_of(), replace(batch, logps_BT=batch.logps_BT[0]))
