"""The loss algebra against the installed TRL's own code: every loss type and option, loss and coefficients, float64.

``GRPOTrainer._compute_loss`` and ``_generate_and_score_completions`` run unchanged on a trainer that has the
attributes they read and nothing else; the model's answer is a float64 leaf. TRL makes its own constants in the default
dtype, so that is float64 here as well.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from driftscope.algebra import coefficients, importance_ratio
from driftscope.batch import TokenBatch
from driftscope.spec import LossSpec
from tests.algebra_batches import MAX_LENGTH, NUM_ITEMS, B, random_batch

trl = pytest.importorskip("trl")
from trl import GRPOTrainer  # noqa: E402

ROUNDING = 1e-12  # relative, float64: some tens of operations
SOURCE = inspect.getsource(GRPOTrainer._compute_loss)
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
HAS_ENTROPY_BONUS = "_entropy_bonus_enabled" in SOURCE
HAS_RESCALING = "self.args.steps_per_generation" in SOURCE
HAS_RATIO_FLOOR = "vllm_importance_sampling_clip_min" in inspect.getsource(GRPOTrainer._generate_and_score_completions)
HAS_AUX_LOSS = "compute_aux_loss" in SOURCE  # the answer is a 3-tuple

ALL_OF_IT = {
    "importance_sampling_level": "token",
    "delta": 1.4,
    "beta": 0.3,
    "kl_bias_correction": True,
    "is_correction": True,
    "is_mode": "token_truncate",
    "is_cap": 1.2,
    "tool_mask": True,
    "off_policy_threshold": 0.05,
    "top_entropy_quantile": 0.6,
    "accumulation_steps": 4,
    "steps_per_generation": 8,
    "num_processes": 2,
}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "asymmetric_clip": {"epsilon_low": 0.1, "epsilon_high": 0.4},
    "delta": {"delta": 1.5},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence_delta": {"importance_sampling_level": "sequence", "delta": 1.1, "epsilon_low": 0.05},
    "kl": {"beta": 0.2},
    "kl_corrected": {"beta": 0.2, "kl_bias_correction": True},
    "kl_corrected_delta": {"beta": 0.2, "kl_bias_correction": True, "delta": 1.3},
    "kl_corrected_sequence": {"beta": 0.2, "kl_bias_correction": True, "importance_sampling_level": "sequence"},
    "token_truncate": {"is_correction": True, "is_mode": "token_truncate", "is_cap": 1.1},
    "token_mask": {"is_correction": True, "is_mode": "token_mask", "is_cap": 1.3},
    "sequence_truncate": {"is_correction": True, "is_mode": "sequence_truncate", "is_cap": 1.2},
    "sequence_mask": {"is_correction": True, "is_mode": "sequence_mask", "is_cap": 1.2},
    "floor": {"is_correction": True, "is_mode": "token_truncate", "is_cap": 1.1, "is_floor": 0.9},
    "token_mask_sequence_level": {
        "is_correction": True,
        "is_mode": "token_mask",
        "importance_sampling_level": "sequence",
    },
    "tool_mask": {"tool_mask": True},
    "tool_mask_sequence": {"tool_mask": True, "importance_sampling_level": "sequence"},
    "off_policy": {"off_policy_threshold": 0.02},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "top_entropy_none_left": {"top_entropy_quantile": 0.0},
    "top_entropy_sequence": {"top_entropy_quantile": 0.4, "importance_sampling_level": "sequence"},
    "accumulation": {"accumulation_steps": 4, "steps_per_generation": 2, "num_processes": 2},
    "sapo_temperatures": {"sapo_temperature_pos": 1.7, "sapo_temperature_neg": 2.3},
    "vespo_shapes": {"vespo_k_pos": 1.2, "vespo_lambda_pos": 1.1, "vespo_k_neg": 0.7, "vespo_lambda_neg": 0.9},
    "all": ALL_OF_IT,
    "all_sequence": {**ALL_OF_IT, "importance_sampling_level": "sequence", "is_mode": "sequence_truncate"},
    "entropy_bonus": {"entropy_coef": 0.1},
    "entropy_bonus_top": {
        "entropy_coef": 0.1,
        "top_entropy_quantile": 0.4,
        "tool_mask": True,
        "accumulation_steps": 3,
    },
    "all_entropy_bonus": {**ALL_OF_IT, "entropy_coef": -0.2},
}


@pytest.fixture(autouse=True)
def _float64_constants():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Accelerator(SimpleNamespace):
    """Collectives of one process, under any claimed world size."""

    device, process_index, sync_gradients = torch.device("cpu"), 0, True
    gather = gather_for_metrics = unwrap_model = staticmethod(lambda x: x)
    pad_across_processes = staticmethod(lambda x, **_: x)
    reduce = staticmethod(lambda x, reduction: x)


class Trainer(GRPOTrainer):
    """TRL's loss code with the model's forward replaced by a given answer; ``object.__new__`` skips the set-up."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return (*self.answer, None) if HAS_AUX_LOSS else self.answer

    def _generate(self, prompts):
        return self.generated

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return torch.arange(float(len(prompts)))[:, None]


def trainer_for(spec: LossSpec, *, training: bool = True) -> Trainer:
    trainer = object.__new__(Trainer)
    args = SimpleNamespace(
        use_bias_correction_kl=spec.kl_bias_correction, delta=spec.delta,
        sapo_temperature_pos=spec.sapo_temperature_pos, sapo_temperature_neg=spec.sapo_temperature_neg,
        vespo_k_pos=spec.vespo_k_pos, vespo_lambda_pos=spec.vespo_lambda_pos,
        vespo_k_neg=spec.vespo_k_neg, vespo_lambda_neg=spec.vespo_lambda_neg,
        steps_per_generation=spec.steps_per_generation or spec.accumulation_steps,
        gradient_accumulation_steps=spec.accumulation_steps,
        per_device_train_batch_size=B, per_device_eval_batch_size=B, gradient_checkpointing_kwargs=None,
    )  # fmt: skip
    trainer.__dict__.update(
        args=args, model=SimpleNamespace(training=training, is_gradient_checkpointing=False),
        accelerator=Accelerator(num_processes=spec.num_processes), _metrics=defaultdict(lambda: defaultdict(list)),
        tools=[print] if spec.tool_mask else None, beta=spec.beta, loss_type=spec.loss_type,
        epsilon_low=spec.epsilon_low, epsilon_high=spec.epsilon_high,
        importance_sampling_level=spec.importance_sampling_level,
        off_policy_mask_threshold=spec.off_policy_threshold, top_entropy_quantile=spec.top_entropy_quantile,
        use_vllm=spec.is_correction, vllm_importance_sampling_correction=spec.is_correction,
        vllm_importance_sampling_mode=spec.is_mode, vllm_importance_sampling_cap=spec.is_cap,
        vllm_importance_sampling_clip_max=spec.is_cap, vllm_importance_sampling_clip_min=spec.is_floor,
        current_gradient_accumulation_steps=spec.accumulation_steps,
        max_completion_length=spec.max_completion_length,
        entropy_coef=spec.entropy_coef, _entropy_bonus_enabled=spec.entropy_coef != 0.0, use_adaptive_entropy=False,
        aux_loss_enabled=False,
    )  # fmt: skip
    return trainer


def trl_coefficients(spec: LossSpec, batch: TokenBatch, *, training: bool = True):
    """TRL's loss, dL/dlogp and dL/dentropy, by autograd through its own ``_compute_loss``."""
    trainer = trainer_for(spec, training=training)
    logps_BT = batch.logps_BT.clone().requires_grad_()
    entropies_BT = batch.entropies_BT.clone().requires_grad_()
    trainer.answer = (logps_BT, entropies_BT)
    ids = torch.zeros_like(batch.completion_mask_BT)
    inputs = {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": ids,
        "completion_mask": batch.completion_mask_BT, "advantages": batch.advantages,
        "num_items_in_batch": torch.tensor(batch.num_items_in_batch),
        "old_per_token_logps": batch.old_logps_BT, "ref_per_token_logps": batch.ref_logps_BT,
        "sampling_per_token_logps": batch.sampling_logps_BT, "tool_mask": batch.tool_mask_BT,
    }  # fmt: skip
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if spec.is_correction:
        inputs["importance_sampling_ratio"] = importance_ratio(spec, batch)
    loss = trainer._compute_loss(None, inputs)
    return loss.item(), *torch.autograd.grad(loss, [logps_BT, entropies_BT], materialize_grads=True)


def require(spec: LossSpec, *, token_advantages: bool = False) -> None:
    """Skip what the installed TRL has not got."""
    if f'"{spec.loss_type}"' not in SOURCE:
        pytest.skip(f"TRL {trl.__version__} has no loss_type={spec.loss_type!r}")
    if spec.entropy_coef and not HAS_ENTROPY_BONUS:
        pytest.skip(f"TRL {trl.__version__} has no entropy bonus")
    if token_advantages and spec.loss_type == "sapo" and "advantages.repeat" in SOURCE:
        pytest.skip(f"TRL {trl.__version__} cannot index (B, T) advantages in its sapo loss")


def make_spec(loss_type: str, **options) -> LossSpec:
    """A spec with the installed TRL's own normaliser."""
    if loss_type in ("dapo", "cispo") and not HAS_RESCALING:
        options.setdefault("normalizer", "generation_batch")
    if loss_type == "cispo":
        options.setdefault("epsilon_high", 1.2)
    return LossSpec(loss_type=loss_type, max_completion_length=MAX_LENGTH, **options)


def assert_equal(spec: LossSpec, batch: TokenBatch, expected) -> None:
    ours = coefficients(spec, batch)
    loss, coefs_BT, entropy_coefs_BT = expected
    assert ours.loss == pytest.approx(loss, rel=ROUNDING, abs=1e-14)
    assert coefs_BT.isfinite().all()
    torch.testing.assert_close(ours.logps_BT, coefs_BT, rtol=ROUNDING, atol=ROUNDING * coefs_BT.abs().max().item())
    if spec.entropy_coef:
        torch.testing.assert_close(ours.entropies_BT, entropy_coefs_BT, rtol=ROUNDING, atol=1e-15)
    else:
        assert ours.entropies_BT is None
        assert not entropy_coefs_BT.any()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_coefficients(loss_type, option):
    spec = make_spec(loss_type, **OPTIONS[option])
    require(spec)
    for seed in range(4):
        batch = random_batch(seed, tools=spec.tool_mask)
        assert_equal(spec, batch, trl_coefficients(spec, batch))


@pytest.mark.parametrize("option", ["plain", "kl_corrected", "sequence_truncate", "off_policy", "all"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_without_old_logps(loss_type, option):
    spec = make_spec(loss_type, **OPTIONS[option])
    require(spec)
    batch = random_batch(11, on_policy=True, tools=spec.tool_mask)
    assert_equal(spec, batch, trl_coefficients(spec, batch))


@pytest.mark.parametrize("option", ["plain", "sequence", "kl_corrected_delta", "token_mask", "off_policy", "all"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_per_token_advantages(loss_type, option):
    spec = make_spec(loss_type, **OPTIONS[option])
    require(spec, token_advantages=True)
    batch = random_batch(12, tools=spec.tool_mask, token_advantages=True)
    assert_equal(spec, batch, trl_coefficients(spec, batch))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_off_policy_mask_falls_back_to_old_logps(loss_type):
    spec = make_spec(loss_type, off_policy_threshold=0.02)
    require(spec)
    batch = replace(random_batch(13), sampling_logps_BT=None)
    assert_equal(spec, batch, trl_coefficients(spec, batch))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_evaluation_has_no_accumulation(loss_type):
    configured = make_spec(loss_type, accumulation_steps=4, steps_per_generation=8)
    require(configured)
    batch = random_batch(14)
    expected = trl_coefficients(configured, batch, training=False)
    assert_equal(configured.replace(accumulation_steps=1, steps_per_generation=1), batch, expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_all_masked(loss_type):
    spec = make_spec(loss_type, beta=0.1, is_correction=True, is_mode="token_truncate")
    require(spec)
    batch = random_batch(15)
    batch = replace(batch, completion_mask_BT=torch.zeros_like(batch.completion_mask_BT))
    assert_equal(spec, batch, trl_coefficients(spec, batch))


def test_no_trained_tokens_in_the_generation_batch():
    """TRL until 1.8 divides by ``num_items_in_batch`` as it is: NaN where nothing is trained on. Here it is 0."""
    spec = make_spec("dapo")
    batch = replace(random_batch(16), num_items_in_batch=0)
    batch = replace(batch, completion_mask_BT=torch.zeros_like(batch.completion_mask_BT))
    loss, *_ = trl_coefficients(spec, batch)
    assert coefficients(spec, batch).loss == 0.0
    assert (loss == 0.0) if HAS_RESCALING else (loss != loss)


def test_only_known_gaps_are_skipped():
    """Whatever the grid skips must be what this TRL is known to lack."""
    missing = {loss_type for loss_type in LOSS_TYPES if f'"{loss_type}"' not in SOURCE}
    known = {"0.27.2": ({"luspo", "vespo"}, False, False, False), "1.16.0": (set(), True, True, True)}
    if trl.__version__ not in known:
        pytest.skip(f"TRL {trl.__version__} is not one of the two pinned stacks")
    assert (missing, HAS_ENTROPY_BONUS, HAS_RESCALING, HAS_RATIO_FLOOR) == known[trl.__version__]


# --- the importance sampling ratio -----------------------------------------------------------------------------------

PAD, EOS = 0, 9


def generation_batch(spec: LossSpec, seed: int, *, unscored: bool = False) -> dict[str, torch.Tensor]:
    """One batch through TRL's ``_generate_and_score_completions``; one completion is truncated and so masked."""
    g = torch.Generator().manual_seed(seed)
    lengths = [5, 3, 1, 4]
    old_BT = -torch.rand(4, 5, generator=g) * 2
    ids = [[1] * (n - 1) + [EOS] for n in lengths]
    ids[3][-1] = 1  # no end of sequence: truncated
    sampling = [(old_BT[i, :n] + 0.4 * torch.randn(n, generator=g)).tolist() for i, n in enumerate(lengths)]
    if unscored:
        sampling[0][1] = None
    tool_mask = [[1, 0, 0, 1, 1], [1] * 3, [1], [1] * 4] if spec.tool_mask else None
    prompts = [[1, 2]] * 4
    trainer = trainer_for(spec)
    trainer.answer = (old_BT, torch.zeros_like(old_BT))
    tail = (None, None) if HAS_AUX_LOSS else ()
    counted = () if HAS_AUX_LOSS else (torch.tensor(sum(lengths)),)
    trainer.generated = (prompts, ids, tool_mask, ["x"] * 4, *counted, sampling, {}, *tail)
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: ["x"] * 4, pad_token_id=PAD)
    trainer.__dict__.update(
        processing_class=tokenizer, _tokenizer=tokenizer, pad_token_id=PAD, eos_token_id=EOS, eos_token_ids=[EOS],
        pad_to_multiple_of=None, mask_truncated_completions=True, num_iterations=1, num_generations=2,
        multi_objective_aggregation="sum_then_normalize", scale_rewards="group", reward_weights=torch.ones(1),
        reward_funcs=[len], reward_func_names=["len"], _logs=defaultdict(lambda: defaultdict(list)),
        environment_factories=None, environments=None, _standalone_tools=[], _pending_extra_logs={},
        _pending_metrics={}, log_multimodal=False, _is_vlm=False, chat_template_kwargs={},
    )  # fmt: skip
    trainer._logs.update({"prompt": [], "completion": [], "advantages": []})
    if spec.tool_mask and HAS_AUX_LOSS:
        trainer.generated = (*trainer.generated[:-1], [None] * 4)
    return trainer._generate_and_score_completions([{"prompt": "p"} for _ in range(4)])


def batch_of(inputs: dict[str, torch.Tensor]) -> TokenBatch:
    return TokenBatch(
        logps_BT=torch.full_like(inputs["old_per_token_logps"], 7.0),  # must not be read where old log-probs exist
        completion_mask_BT=inputs["completion_mask"],
        advantages=inputs["advantages"],
        old_logps_BT=inputs["old_per_token_logps"],
        sampling_logps_BT=inputs["sampling_per_token_logps"],
        tool_mask_BT=inputs.get("tool_mask"),
        num_items_in_batch=NUM_ITEMS,
    )


@pytest.mark.parametrize("tool_mask", [False, True])
@pytest.mark.parametrize("bounds", [(1.1, None), (3.0, None), (1.1, 0.9), (None, 0.9)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_ratio(mode, bounds, tool_mask):
    cap, floor = bounds
    if (floor is not None or cap is None) and not HAS_RATIO_FLOOR:
        pytest.skip(f"TRL {trl.__version__} has no lower bound of the ratio and cannot go without an upper one")
    spec = LossSpec(is_correction=True, is_mode=mode, is_cap=cap, is_floor=floor, tool_mask=tool_mask)
    for seed in range(5):
        inputs = generation_batch(spec, seed)
        expected = inputs["importance_sampling_ratio"]
        assert inputs["completion_mask"].sum(-1).tolist() == [5, 3, 1, 0]
        ours = importance_ratio(spec, batch_of(inputs))
        assert ours.shape == expected.shape == ((4, 5) if mode.startswith("token") else (4, 1))
        torch.testing.assert_close(ours, expected, rtol=ROUNDING, atol=0.0)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_importance_ratio_of_unscored_tokens(mode):
    if not HAS_RATIO_FLOOR:
        pytest.skip(f"TRL {trl.__version__} has no handling of tokens that the engine could not score")
    spec = LossSpec(is_correction=True, is_mode=mode)
    inputs = generation_batch(spec, 0, unscored=True)
    assert inputs["sampling_per_token_logps"].isnan().any()
    ours = importance_ratio(spec, batch_of(inputs))
    torch.testing.assert_close(ours, inputs["importance_sampling_ratio"], rtol=ROUNDING, atol=0.0)


def test_off_policy_mask_with_unscored_tokens():
    if not HAS_RATIO_FLOOR:
        pytest.skip(f"TRL {trl.__version__} has no handling of tokens that the engine could not score")
    spec = make_spec("dapo", off_policy_threshold=0.05)
    batch = random_batch(17)
    batch.sampling_logps_BT[1, 0] = batch.sampling_logps_BT[5, 2] = torch.nan
    assert_equal(spec, batch, trl_coefficients(spec, batch))
