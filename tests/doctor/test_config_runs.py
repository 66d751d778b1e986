"""What the rules on a configuration foresee, against what real runs of the same configuration record."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from driftscope import attach
from driftscope.doctor import Facts, chosen_rules, foresee
from driftscope.hooks.doctor.model_facts import model_facts
from driftscope.hooks.doctor.settings import settings_of
from driftscope.rules.ds204_sequence_product import predict as predict_sequence_product
from driftscope.rules.ds206_group_size import zero_variance
from tests.hooks import runs

LORA = partial(LoraConfig, r=4, target_modules=["q_proj", "v_proj"])


def facts_of(trainer):
    settings = settings_of(trainer)
    return Facts(settings=settings, model=model_facts(trainer, settings))


def found(facts, code):
    diagnosis = foresee(facts, rules=chosen_rules([code]))
    assert not diagnosis.failed
    return diagnosis[0] if diagnosis else None


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def recorded(trainer, run_dir):
    """Train with Driftscope attached; the importance sampling ratio of each step."""
    scope = attach(trainer, run_dir=run_dir, spectrum_every=1, deep_every=0)
    try:
        trainer.train()
    finally:
        scope.detach()
    return [step.is_ratio for step in runs.steps_of(run_dir)]


# DS201


@pytest.mark.parametrize(
    ("arch", "sampling"),
    [
        ("qwen2", {"top_p": 0.8}),
        ("llama", {"top_p": 0.8}),
        ("gemma2", {"top_p": 0.8}),
        ("cohere", {"top_p": 0.8}),
        ("qwen2", {"generation_kwargs": {"top_p": 0.8}}),
        ("qwen2", {"min_p": 0.05}),
    ],
)
def test_the_predicted_ratio_is_the_one_that_a_run_records(arch, sampling, tmp_path):
    run = {"max_steps": 1, "vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": 16}
    with runs.trainer(tmp_path, arch=arch, **run, **sampling) as trainer:
        runs.even_lengths(trainer)
        facts = facts_of(trainer)
        if "generation_kwargs" in sampling:  # even_lengths has put its own in their place
            kwargs = {"ignore_eos": True, **sampling["generation_kwargs"]}
            generation = getattr(trainer, "vllm_generation", trainer.args)
            generation.generation_kwargs = kwargs
            facts = facts_of(trainer) if generation is trainer.args else facts
        ratios = recorded(trainer, tmp_path / "run")
    kept = facts.model.kept_mass
    finding = found(facts, "DS201")
    assert finding is not None and finding.severity == "critical"
    token = sum(ratio.raw_token.mean for ratio in ratios) / len(ratios)
    assert token == pytest.approx(kept, rel=0.05)
    log_sequence = sum(math.log(ratio.raw.mean) for ratio in ratios) / len(ratios)
    assert log_sequence == pytest.approx(16 * math.log(kept), rel=0.2)


def test_the_whole_vocabulary_is_not_flagged_and_its_ratio_is_one(tmp_path):
    with runs.trainer(tmp_path, max_steps=1) as trainer:
        facts = facts_of(trainer)
        ratios = recorded(trainer, tmp_path / "run")
    assert found(facts, "DS201") is None and facts.model.kept_mass is None
    assert ratios[0].raw_token.mean == pytest.approx(1.0, abs=1e-4)


# DS204


def test_the_share_that_noise_masks_is_the_one_that_a_run_masks(tmp_path, stack):
    cap = "vllm_importance_sampling_cap" if stack.name == "seed" else "vllm_importance_sampling_clip_max"
    run = {cap: 1.05, "vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": 48, "max_steps": 1}
    run |= {"bf16": True, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    with runs.trainer(tmp_path, **run) as trainer:
        runs.even_lengths(trainer)
        facts = facts_of(trainer)
        ratios = recorded(trainer, tmp_path / "run")
    finding = found(facts, "DS204")
    assert finding.severity == "warning" and "measured on this model" in finding.evidence
    spread = facts.model.logp_noise * math.sqrt(48)
    wanted = 0.5 * math.erfc(math.log(1.05) / spread / math.sqrt(2))
    masked = sum(ratio.applied.share_masked for ratio in ratios) / len(ratios)
    deviation = math.sqrt(wanted * (1 - wanted) / 64)
    assert wanted > 0.1 and abs(masked - wanted) < 4 * deviation
    assert ratios[0].raw_token.std == pytest.approx(facts.model.logp_noise, rel=0.5)


def test_in_float32_nothing_is_masked_and_nothing_foreseen(tmp_path):
    run = {"vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": 48, "max_steps": 1}
    with runs.trainer(tmp_path, **run) as trainer:
        runs.even_lengths(trainer)
        facts = facts_of(trainer)
        ratios = recorded(trainer, tmp_path / "run")
    assert facts.model.logp_noise == 0.0 and predict_sequence_product(facts, None) is None
    assert ratios[0].applied.share_masked == 0.0


# DS205


def test_a_cold_group_repeats_itself_as_foreseen(tmp_path):
    with runs.trainer(tmp_path, temperature=0.002, max_steps=1) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        shares = logged(trainer, "frac_reward_zero_std")
    finding = found(facts, "DS205")
    assert finding.severity == "warning" and "measured on this model" in finding.evidence
    assert shares == [1.0]


def test_at_temperature_one_groups_differ_and_nothing_is_foreseen(tmp_path):
    with runs.trainer(tmp_path, max_steps=1) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        assert logged(trainer, "frac_reward_zero_std") == [0.0]
    assert found(facts, "DS205") is None


def test_temperature_zero_ends_the_run_or_makes_its_gradient_nan(tmp_path, stack):
    with runs.trainer(tmp_path, temperature=0.0, use_vllm=False, max_steps=1) as trainer:
        facts = facts_of(trainer)
        if stack.name == "seed":
            trainer.train()
            assert math.isnan(logged(trainer, "grad_norm")[0])
        else:
            with pytest.raises(ValueError, match="strictly positive"):
                trainer.train()
    assert found(facts, "DS205").severity == "critical"
    assert "temperature=0 is not positive" in facts.model.unavailable["log_collision"]


def test_a_second_temperature_in_generation_kwargs_shows_in_the_ratio(tmp_path):
    run = {"generation_kwargs": {"temperature": 0.5}, "vllm_importance_sampling_mode": "token_truncate"}
    with runs.trainer(tmp_path, max_steps=1, **run) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        applied = logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert found(facts, "DS205").severity == "warning"
    assert abs(applied[0] - 1.0) > 0.1


# DS206


@pytest.mark.parametrize("size", [2, 8])
def test_the_share_of_groups_without_variance_is_the_one_that_a_run_logs(size, tmp_path):
    coin = random.Random(0)

    def toss(completions, **_):
        return [float(coin.random() < 0.5) for _ in completions]

    run = {"per_device_train_batch_size": 16, "max_steps": 4, "max_completion_length": 2, "num_generations": size}
    with runs.trainer(tmp_path, reward=toss, **run) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        shares = logged(trainer, "frac_reward_zero_std")
    wanted, groups = zero_variance(0.5, size), 4 * 32 // size
    share = sum(shares) / len(shares)
    assert abs(share - wanted) <= 3 * math.sqrt(wanted * (1 - wanted) / groups)
    assert (found(facts, "DS206") is not None) == (size == 2)


# DS114


def weights_after(directory, **run):
    with runs.trainer(directory, max_steps=2, **run) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        return facts, [p.detach().clone() for p in trainer.model.parameters()]


def test_kl_options_without_beta_change_no_weight(tmp_path, stack):
    # Switched against the default of this TRL, so that it counts as set: 1.16 has the correction on.
    off, plain = weights_after(tmp_path / "a", use_bias_correction_kl=False)
    on, corrected = weights_after(tmp_path / "b", use_bias_correction_kl=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, corrected, strict=True))
    assert found(off, "DS114") is None
    assert (found(on, "DS114") is not None) == (stack.name == "seed")


def test_synchronising_a_reference_that_does_not_exist(tmp_path, stack):
    run = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    if stack.name == "current":
        with pytest.raises(ValueError, match="nothing to synchronize"):
            weights_after(tmp_path / "a", **run)
        return
    facts, weights = weights_after(tmp_path / "a", **run)
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_after(tmp_path / "b")[1], strict=True))
    assert found(facts, "DS114").severity == "warning"


def test_with_beta_the_options_are_at_work(tmp_path):
    facts, _ = weights_after(tmp_path, beta=0.1, use_bias_correction_kl=True)
    assert found(facts, "DS114") is None


# DS115


def trained_adapter(model, modules=("q_proj", "v_proj")):
    """The user's own PEFT model, with an adapter that was trained before."""
    wrapped = get_peft_model(model, LORA(target_modules=list(modules)))
    generator = torch.Generator().manual_seed(0)
    for name, p in wrapped.named_parameters():
        if "lora_" in name:
            p.data.normal_(generator=generator).mul_(0.05)
    return wrapped


def changed_after_loading(model):
    for p in model.parameters():
        p.data.mul_(1.02)
    return model


OTHER_START = {
    "weights changed after loading": {"wrap": changed_after_loading},
    "a trained adapter on the embedding": {"wrap": partial(trained_adapter, modules=("q_proj", "embed_tokens"))},
    "a new adapter that does not start at zero": {
        "trainer_class": partial(GRPOTrainer, peft_config=LORA(init_lora_weights=False, lora_alpha=1))
    },
}
SAME_START = {
    "a model as loaded": {},
    "mixed precision": {"bf16": True},
    "a new adapter": {"wrap": lambda model: get_peft_model(model, LORA())},
    "a trained adapter, copied": {"wrap": trained_adapter},
    "an adapter that TRL makes": {"trainer_class": partial(GRPOTrainer, peft_config=LORA())},
}


@pytest.mark.parametrize("start", list(OTHER_START))
def test_another_reference_is_foreseen_with_the_kl_of_the_first_step(start, tmp_path):
    batch = {"per_device_train_batch_size": 16, "max_completion_length": 32}
    with runs.trainer(tmp_path, beta=0.1, max_steps=1, **batch, **OTHER_START[start]) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        first = logged(trainer, "kl")[0]
    finding = found(facts, "DS115")
    assert finding is not None
    assert first == pytest.approx(facts.model.reference_kl, rel=0.35)  # other prompts and completions


@pytest.mark.parametrize("start", list(SAME_START))
def test_the_start_itself_as_reference_is_not(start, tmp_path):
    with runs.trainer(tmp_path, beta=0.1, max_steps=1, **SAME_START[start]) as trainer:
        facts = facts_of(trainer)
        trainer.train()
        first = logged(trainer, "kl")[0]
    assert found(facts, "DS115") is None and facts.model.reference_kl is not None
    assert first == pytest.approx(facts.model.reference_kl, abs=1e-5)


# DS403, DS404


@pytest.mark.parametrize(
    ("dtype", "rate", "code"),
    [
        (torch.bfloat16, 1e-6, "DS403"),
        (torch.bfloat16, 2e-4, "DS403"),
        (torch.bfloat16, 1e-2, None),
        (None, 1e-6, None),
    ],
)
def test_the_share_of_lost_updates_is_the_one_after_a_real_step(dtype, rate, code, tmp_path):
    run = {"learning_rate": rate, "max_steps": 1, "weight_decay": 0.0, "max_grad_norm": 0.0}
    with runs.trainer(tmp_path, dtype=dtype, **run) as trainer:
        facts = facts_of(trainer)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        moved: dict[str, torch.Tensor] = {}
        for name, p in trainer.model.named_parameters():
            # A step has the size of the learning rate where the gradient is well over adam_epsilon.
            p.register_hook(lambda g, name=name: moved.__setitem__(name, moved.get(name, 0) + g.detach().float()))
        trainer.train()
        lost = total = 0
        for name, p in trainer.model.named_parameters():
            stepped = moved[name].abs() > 1e-4
            lost += int((stepped & (p.detach() == before[name])).sum())
            total += int(stepped.sum())
    assert total > 10_000
    assert lost / total == pytest.approx(facts.model.lost_update_share, abs=0.05)
    finding = found(facts, "DS403")
    assert (finding.rule if finding else None) == code


def test_adapters_of_a_bfloat16_model_keep_their_updates(tmp_path):
    wrap = lambda model: get_peft_model(model, LORA())  # noqa: E731
    with runs.trainer(tmp_path, dtype=torch.bfloat16, learning_rate=1e-6, wrap=wrap) as trainer:
        facts = facts_of(trainer)
    assert set(facts.model.dtypes) == {"float32"} and found(facts, "DS403") is None


def test_torch_refuses_to_unscale_float16_gradients(tmp_path):
    with runs.trainer(tmp_path, dtype=torch.float16) as trainer:
        facts = facts_of(trainer)
        ids = torch.arange(6)[None]
        loss = trainer.model(input_ids=ids, labels=ids).loss
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(optimizer)
    scaled = Facts(
        settings=facts.settings.__class__(values={**facts.settings.values, "fp16": True}), model=facts.model
    )
    assert found(scaled, "DS404").severity == "critical"
    assert found(facts, "DS404") is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp16_training_fails_with_float16_weights_alone(dtype, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with runs.trainer(tmp_path, dtype=dtype, fp16=True, use_cpu=False, use_vllm=False, max_steps=1) as trainer:
        facts = facts_of(trainer)
        if dtype == torch.float16:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                trainer.train()
        else:
            trainer.train()
    assert (found(facts, "DS404") is not None) == (dtype == torch.float16)
