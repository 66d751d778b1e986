"""Gradient flow under the real RewardTrainer: the head keeps the backward going while the adapters learn nothing."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification, PrinterCallback
from trl import RewardConfig, RewardTrainer

from driftscope.doctor import Facts, foresee
from driftscope.hooks.doctor.fixes import fix
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.hooks.tiny import tiny_tokenizer
from tests.doctor.test_flow import SHAPE
from tests.doctor.test_flow_grpo import CHECKPOINTED, by_keyword, lora_b, wrapped
from tests.hooks.runs import reset_accelerate

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
WORDS = {"chosen": ["w1 w2 w3", "w4 w5"] * 4, "rejected": ["w6 w7", "w8 w9 w1"] * 4}


def classifier():
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SHAPE | {"vocab_size": 512, "pad_token_id": 509}, num_labels=1)
    return AutoModelForSequenceClassification.from_config(config)


def plain(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"))


@contextmanager
def rewards(directory, wrap, **overrides):
    reset_accelerate()
    arguments = {
        "output_dir": str(directory),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    } | overrides
    made = RewardTrainer(
        model=wrap(classifier()),
        args=RewardConfig(**arguments),
        train_dataset=Dataset.from_dict(WORDS),
        processing_class=tiny_tokenizer(),
    )
    made.remove_callback(PrinterCallback)
    try:
        yield made
    finally:
        reset_accelerate()


def wrapped_classifier(model):
    return wrapped(model, task_type="SEQ_CLS")


@pytest.mark.parametrize(
    ("wrap", "overrides", "line"),
    [
        (wrapped_classifier, {"gradient_checkpointing": False}, "model.enable_input_require_grads()"),
        (
            lambda model: by_keyword(model, task_type="SEQ_CLS"),
            CHECKPOINTED,
            'RewardConfig(gradient_checkpointing_kwargs={"use_reentrant": False})',
        ),
    ],
    ids=["wrapped", "by keyword"],
)
def test_cut_adapters_beside_a_trained_head(tmp_path, wrap, overrides, line):
    with rewards(tmp_path, wrap, **overrides) as made:
        flow = gradient_flow(made)
        assert flow.error is None and flow.adapters_missing == flow.adapters == 8
        found = foresee(Facts(flow=flow))
        assert found.rules == ("DS302", "DS303") and found[0].remedy.startswith(line)
        made.train()
        moved, still = lora_b(made.model)
        assert moved == set() and still == {name for name in flow.missing if "lora_B" in name}
    with rewards(tmp_path, wrap, **overrides) as made:
        assert [f.action for f in fix(made, ["DS302"]) if f.applied] == [line]
        made.train()
        assert lora_b(made.model)[1] == set()


def test_the_defaults_flow(tmp_path):
    with rewards(tmp_path, plain) as made:
        flow = gradient_flow(made)
        assert flow.ok and flow.checkpointing != "none", "RewardConfig checkpoints by default"
        made.train()
        assert lora_b(made.model)[1] == set()
