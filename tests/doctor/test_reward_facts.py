"""Facts measured through the real RewardTrainer, and the rules that fire on them; each beside an honest run."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, Qwen2ForSequenceClassification
from trl import RewardConfig
from trl.trainer.reward_trainer import DataCollatorForPreference

import driftscope
from driftscope.doctor.facts import Facts, Settings
from driftscope.doctor.foresee import foresee
from driftscope.errors import UsageError
from driftscope.hooks.doctor.diagnose import diagnose_config
from driftscope.hooks.doctor.reward_facts import reward_facts
from driftscope.hooks.tiny import save_tiny, tiny_model, tiny_reward_model, tiny_tokenizer
from tests.doctor.reward_runs import pairs, reward_trainer
from tests.hooks.runs import IS_SEED_STACK

ARCHS = ("qwen2", "llama", "gemma2", "mistral", "gpt2")
OWN = tuple(f"DS30{i}" for i in range(4, 10))


def fired(facts):
    """Codes of the rules on reward models that fire."""
    diagnosis = foresee(Facts(reward=facts, flow=facts.flow))
    assert not diagnosis.failed
    return tuple(code for code in sorted(diagnosis.rules) if code in OWN)


def lora(**settings):
    return LoraConfig(r=4, **({"fan_in_fan_out": True} if settings.pop("arch", "") == "gpt2" else {}), **settings)


class WithLmHead(Qwen2ForSequenceClassification):
    """A reward model that kept its language model head, which the reward does not depend on."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


# --- honest runs


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_honest_run_has_no_finding(arch, checkpointing, tmp_path):
    model = tiny_reward_model(arch)
    config = driftscope.reward_lora_config(model, r=4)
    with reward_trainer(tmp_path, model, peft_config=config, gradient_checkpointing=checkpointing) as trainer:
        facts = reward_facts(trainer)
        assert fired(facts) == ()
        assert facts.trainer
        assert facts.pairs == 4
        assert facts.head_grad_norm > 0.1
        assert facts.loss_change > 1e-6
        assert facts.padding_shift < 1e-4
        assert facts.adapters == facts.adapters_reached > 0
        assert facts.input_grads == checkpointing  # TRL enables them for checkpointing
        assert facts.flow.ok
        assert (facts.flow.checkpointing != "none") == checkpointing
        trainer.train()
        lora_b = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert all(bool(p.any()) for p in lora_b)


def test_full_training_has_no_finding(tmp_path):
    with reward_trainer(tmp_path) as trainer:
        facts = reward_facts(trainer)
        assert fired(facts) == ()
        assert not facts.peft
        assert facts.adapters is facts.head_saved is facts.adapters_reached is None
        assert facts.head_trains


# --- DS304, DS305, DS306


@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_task_type_the_head_stays_random_and_unsaved(arch, tmp_path):
    with reward_trainer(tmp_path, arch=arch, peft_config=lora(arch=arch)) as trainer:
        facts = reward_facts(trainer)
        assert fired(facts) == ("DS304", "DS305", "DS306")
        assert facts.head == "score"
        assert facts.task_type is None
        assert facts.head_grad_norm == 0.0
        assert facts.loss_change > 0  # the loss depends on the head all the same
        before = trainer.model.get_base_model().score.weight.clone()
        trainer.train()
        assert torch.equal(trainer.model.get_base_model().score.weight, before)


def test_another_task_type_leaves_the_head_frozen_too(tmp_path):
    with reward_trainer(tmp_path, peft_config=lora(task_type=TaskType.QUESTION_ANS)) as trainer:
        facts = reward_facts(trainer)
        assert facts.task_type == "QUESTION_ANS"
        assert fired(facts) == ("DS304", "DS305", "DS306")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_default_of_trls_model_config_is_refused_by_peft_and_predicted(arch, tmp_path):
    model, config = tiny_reward_model(arch), lora(arch=arch, task_type="CAUSAL_LM")
    facts = reward_facts(model, peft_config=copy.deepcopy(config))
    assert fired(facts) == ("DS304",)
    refusal = pytest.raises(AttributeError, match="prepare_inputs_for_generation")
    with refusal as refused, reward_trainer(tmp_path, model, peft_config=config):
        pass
    assert str(refused.value) in facts.peft_error


def test_a_language_model_trains_in_silence_on_logits_of_tokens(tmp_path):
    model = tiny_model(num_labels=1)  # what TRL looks at
    with reward_trainer(tmp_path, model, peft_config=lora(task_type="CAUSAL_LM")) as trainer:
        facts = reward_facts(trainer)
        assert fired(facts) == ("DS304", "DS308")
        assert facts.head is None
        assert facts.reward_shape[-1] == 512
        assert len(facts.reward_shape) == 2
        trainer.train()


def test_lora_on_the_head_does_not_save_it(tmp_path):
    with reward_trainer(tmp_path, peft_config=lora(target_modules="all-linear")) as trainer:
        facts = reward_facts(trainer)
        assert fired(facts) == ("DS304", "DS305")
        assert facts.head_adapted
        assert not facts.head_saved


def test_a_head_that_was_unfrozen_by_hand_is_lost(tmp_path):
    adapted = get_peft_model(tiny_reward_model(), lora(task_type="FEATURE_EXTRACTION"))
    adapted.get_base_model().score.requires_grad_(True)
    with reward_trainer(tmp_path, adapted) as trainer:
        facts = reward_facts(trainer)
        assert facts.head_trains
        assert facts.head_grad_norm > 0.1
        assert not facts.head_saved
        assert fired(facts) == ("DS304", "DS305")


def test_a_head_frozen_by_hand(tmp_path):
    with reward_trainer(tmp_path, peft_config=lora(task_type="SEQ_CLS")) as trainer:
        assert fired(reward_facts(trainer)) == ()
        trainer.model.get_base_model().score.requires_grad_(False)
        facts = reward_facts(trainer)
        assert fired(facts) == ("DS306",)
        assert facts.head_saved


def test_the_right_head_by_name_is_enough_without_a_task_type(tmp_path):
    with reward_trainer(tmp_path, peft_config=lora(modules_to_save=["score"])) as trainer:
        diagnosis = foresee(Facts(reward=reward_facts(trainer)))
        assert [(f.rule, f.severity) for f in diagnosis] == [("DS304", "info")]


def test_a_head_of_another_name_is_not_saved_by_the_task_type():
    settings = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "pad_token_id": 5}
    config = AutoConfig.for_model("xlnet", num_labels=1, vocab_size=64, **settings)
    model = AutoModelForSequenceClassification.from_config(config)
    wrong = reward_facts(copy.deepcopy(model), peft_config=lora(task_type="SEQ_CLS", target_modules=["layer_1"]))
    assert wrong.head == "logits_proj"
    assert wrong.unsaved == ("sequence_summary", "logits_proj")
    assert "DS305" in fired(wrong)
    right = reward_facts(model, peft_config=driftscope.reward_lora_config(model, target_modules=["layer_1"]))
    assert right.unsaved == ()
    assert "DS305" not in fired(right)


def test_whether_the_head_is_random_is_read_from_the_checkpoint(tmp_path):
    tiny_model().save_pretrained(tmp_path / "language")
    tiny_reward_model().save_pretrained(tmp_path / "reward")
    load = AutoModelForSequenceClassification.from_pretrained
    fresh = reward_facts(load(tmp_path / "language", num_labels=1))
    assert fresh.head_random
    assert "has no score.weight" in fresh.head_random_evidence
    trained = reward_facts(load(tmp_path / "reward", num_labels=1), peft_config=lora())
    assert trained.head_random is False
    assert "has its weights" in trained.head_random_evidence
    assert fired(trained) == ("DS304", "DS305")  # frozen, but not random
    other = load(tmp_path / "reward", num_labels=2, ignore_mismatched_sizes=True)
    assert reward_facts(other).head_random
    assert "(1, 64) in the checkpoint" in reward_facts(other).head_random_evidence


def test_without_a_checkpoint_the_statistics_tell():
    model = tiny_reward_model()
    assert reward_facts(model).head_random
    assert "config.initializer_range 0.02" in reward_facts(model).head_random_evidence
    with torch.no_grad():
        model.score.weight.mul_(3.0)  # as training might
    assert reward_facts(model).head_random is False
    with torch.no_grad():
        model.score.weight.zero_()
    assert reward_facts(model).head_random


def test_an_adapter_that_was_loaded_brings_a_trained_head(tmp_path):
    model = tiny_reward_model()
    config = driftscope.reward_lora_config(model, r=4)
    with reward_trainer(tmp_path, model, peft_config=config, max_steps=4) as trainer:
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(tiny_reward_model(), tmp_path / "adapter", is_trainable=True)
    facts = reward_facts(again)
    assert facts.head_random is False
    assert "differs from the one it began with" in facts.head_random_evidence
    assert fired(facts) == ()


# --- DS307


@pytest.mark.parametrize("arch", ARCHS)
def test_target_modules_that_match_nothing_are_refused_by_peft_and_predicted(arch, tmp_path):
    model, config = tiny_reward_model(arch), lora(task_type="SEQ_CLS", target_modules=["query", "value"])
    facts = reward_facts(model, peft_config=copy.deepcopy(config))
    assert fired(facts) == ("DS307",)
    with pytest.raises(ValueError, match="target") as refused, reward_trainer(tmp_path, model, peft_config=config):
        pass
    assert str(refused.value) in facts.peft_error


def test_an_adapter_outside_the_path_to_the_reward(tmp_path):
    config = tiny_reward_model().config
    for target, codes in (("lm_head", ("DS307",)), ("v_proj", ())):
        settings = lora(task_type="SEQ_CLS", target_modules=[target])
        with reward_trainer(tmp_path, WithLmHead(copy.deepcopy(config)), peft_config=settings) as trainer:
            facts = reward_facts(trainer)
            assert facts.head == "score"
            assert (facts.adapters_reached == 0) == bool(codes)
            assert fired(facts) == codes
            trainer.train()
            weights = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
            assert any(bool(p.any()) for p in weights) != bool(codes)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_adapters_that_reentrant_checkpointing_cuts_off(tmp_path):
    model = tiny_reward_model("gemma2")
    with reward_trainer(tmp_path, model, peft_config=driftscope.reward_lora_config(model)) as trainer:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        facts = reward_facts(trainer)
        assert facts.head_grad_norm > 0.1
        trainer.train()
        weights = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        learnt = any(bool(p.any()) for p in weights)
    assert learnt == (facts.adapters_reached > 0)
    assert learnt == (fired(facts) == ())
    if IS_SEED_STACK:  # transformers 5 enables input gradients with checkpointing
        assert not learnt
        assert facts.input_grads is False


# --- DS308


def test_two_labels_train_in_silence_or_are_refused(tmp_path):
    model = tiny_reward_model(num_labels=2)
    assert fired(reward_facts(model)) == ("DS308",)
    if not IS_SEED_STACK:
        with pytest.raises(ValueError, match="num_labels=2"), reward_trainer(tmp_path, model):
            pass
        return
    with reward_trainer(tmp_path, model) as trainer:
        facts = reward_facts(trainer)
        assert facts.reward_shape == (2,)
        assert fired(facts) == ("DS308",)
        trainer.train()


def test_a_model_given_by_its_path_has_the_labels_that_trl_gives_it(tmp_path):
    tiny_model().save_pretrained(tmp_path / "language")
    with reward_trainer(tmp_path, str(tmp_path / "language")) as trainer:
        assert fired(reward_facts(trainer)) == (("DS308",) if IS_SEED_STACK else ())
    with reward_trainer(tmp_path, str(tmp_path / "language"), model_init_kwargs={"num_labels": 1}) as trainer:
        assert fired(reward_facts(trainer)) == ()


# --- DS309


@pytest.mark.parametrize("arch", ARCHS)
def test_a_collator_that_pads_with_another_id_moves_the_reward(arch, tmp_path):
    for pad, codes in ((3, ("DS309",)), (509, ())):
        with reward_trainer(tmp_path, arch=arch, data_collator=DataCollatorForPreference(pad_token_id=pad)) as trainer:
            facts = reward_facts(trainer)
            assert fired(facts) == codes
            trainer.train()


def test_without_a_pad_token_a_batch_is_refused(tmp_path):
    model = tiny_reward_model(pad_token_id=None)
    facts = reward_facts(model)
    assert "Cannot handle batch sizes > 1" in facts.padding_error
    assert fired(facts) == ("DS309",)
    assert facts.head_grad_norm > 0  # measured all the same, one sequence at a time
    with reward_trainer(tmp_path, model) as trainer:  # TRL sets it
        assert fired(reward_facts(trainer)) == ()


def test_a_pad_token_without_an_embedding(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with reward_trainer(tmp_path, tokenizer=tokenizer) as trainer:
        facts = reward_facts(trainer)
        assert "512 is outside the embedding, which has 512 rows" in facts.padding_error
        assert fired(facts) == ("DS309",)
        with pytest.raises(IndexError):
            trainer.train()


def test_pairs_of_one_length_are_padded_for_the_measurement(tmp_path):
    texts = {"chosen": ["w1 w2"] * 4, "rejected": ["w3 w4"] * 4}
    with reward_trainer(tmp_path, dataset=type(pairs()).from_dict(texts)) as trainer:
        assert reward_facts(trainer).padding_shift < 1e-4
        trainer.model.config.pad_token_id = 7
        assert reward_facts(trainer).padding_shift > 0.05
        trainer.data_collator.pad_token_id = 512
        assert "512 is outside the embedding" in reward_facts(trainer).padding_error


# --- bad input, and the way through diagnose


def test_a_batch_that_is_none_is_refused(tmp_path):
    model = tiny_reward_model()
    ids = torch.ones(2, 3, dtype=torch.long)
    assert reward_facts(model, {"input_ids": ids}).pairs == 1
    for batch, words in (
        ({}, "missing"),
        ({"input_ids": ids[:1]}, "chosen sequences above"),
        ({"input_ids": ids, "attention_mask": ids[:, :2]}, "both are"),
    ):
        with pytest.raises(UsageError, match=words):
            reward_facts(model, batch)
    with pytest.raises(UsageError, match="neither"):
        reward_facts(3)
    with reward_trainer(tmp_path) as trainer, pytest.raises(UsageError, match="is for a model"):
        reward_facts(trainer, peft_config=lora())


def test_diagnose_finds_it_in_the_trainer(tmp_path):
    with reward_trainer(tmp_path, peft_config=lora()) as trainer:
        found = driftscope.diagnose(trainer, select=["DS304", "DS305", "DS306"])
        assert set(found.rules) == {"DS304", "DS305", "DS306"}
        assert all("reward_lora_config(model)" in finding.remedy for finding in found)
    with reward_trainer(tmp_path, peft_config=lora(task_type="SEQ_CLS")) as trainer:
        assert not driftscope.diagnose(trainer, select=OWN)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"lora_task_type": "CAUSAL_LM"}, "DS304"),
        ({"lora_task_type": "SEQ_CLS", "lora_target_modules": ["query"]}, "DS307"),
        ({"lora_task_type": "SEQ_CLS"}, None),
    ],
)
def test_a_configuration_that_peft_refuses_is_foreseen(values, code, tmp_path):
    save_tiny(tmp_path)
    values = {"use_peft": True, "model_name_or_path": str(tmp_path), **values}
    settings = Settings(trainer="reward", values=values, given=frozenset(values))
    diagnosis = diagnose_config(settings, select=["DS304", "DS307"], stack=False)
    assert diagnosis.rules == ((code,) if code else ())
    assert (diagnosis.facts.reward is None) == bool(code)


def test_trl_switches_checkpointing_on_by_default(tmp_path):
    assert RewardConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).gradient_checkpointing
