"""The stand-in engine: its interface, its own copy of the weights, and TRL's own ratio in real runs on top of it."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from driftscope.errors import UsageError
from driftscope.hooks.demo import build_trainer, quiet
from driftscope.hooks.sampler import EngineSettings, SamplingParams, StandInLLM, stand_in_engine
from driftscope.hooks.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.hooks.runs import reset_accelerate

GREEDY = SamplingParams(temperature=1.0, top_k=1, max_tokens=6, logprobs=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "model"))


def engine(checkpoint, **settings):
    return StandInLLM(checkpoint, gpu_memory_utilization=0.3, settings=EngineSettings(**settings))


def weights(llm):
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


# -- the interface ---------------------------------------------------------------------------------------------------


def test_log_probs_are_those_of_the_kept_set_renormalised(checkpoint):
    llm = engine(checkpoint)
    params = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=8, logprobs=0)
    request = llm.generate(["w1 w2 w3", "w4 w5 w6 w7 w8"], sampling_params=params, use_tqdm=False)[0]
    assert request.prompt_token_ids == [1, 2, 3]
    (output,) = request.outputs
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *output.token_ids]])).logits[0, 2:-1]
    probs = (logits.double() / 0.9).softmax(-1)
    for row, token, found in zip(probs, output.token_ids, output.logprobs, strict=True):
        ordered = row.sort(descending=True)
        kept = int((ordered.values.cumsum(0) < 0.8).sum()) + 1
        mass = ordered.values[:kept].sum()
        assert token in ordered.indices[:kept]
        assert set(found) == {token}
        assert found[token].logprob == pytest.approx((row[token] / mass).log().item(), abs=2e-5)
        assert found[token].rank == int((row > row[token]).sum()) + 1


def test_text_ids_and_conversation_are_the_same_prompt(checkpoint):
    llm = engine(checkpoint)
    text, ids = (llm.generate([p], GREEDY)[0] for p in ("w1 w2", {"prompt_token_ids": [1, 2]}))
    assert text == ids
    conversation = [{"role": "user", "content": "w1"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]
    chats = [llm.chat([c], sampling_params=GREEDY, tools=None, chat_template=None)[0] for c in (conversation, parts)]
    assert chats[0] == chats[1] == llm.generate(["<user> w1 <assistant>"], GREEDY)[0]


def test_n_completions_come_grouped_by_prompt(checkpoint):
    params = SamplingParams(n=3, max_tokens=4)
    first, second = engine(checkpoint).generate(["w1", "w2 w3"], params)
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert second.prompt_token_ids == [2, 3]
    assert first.outputs[0].logprobs is None


def test_the_end_of_sequence_stops_unless_ignored(checkpoint):
    llm = engine(checkpoint)
    eos = llm.tokenizer.eos_token_id
    with torch.no_grad():  # a head that answers the end of sequence only
        weights(llm).module.lm_head.weight.zero_()
        weights(llm).module.lm_head.weight[eos] = weights(llm).module(torch.tensor([[1]]), output_hidden_states=True)[
            "hidden_states"
        ][-1][0, -1]
    stopped = llm.generate(["w1"], GREEDY)[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason) == ([eos], "stop")
    ignored = llm.generate(["w1"], SamplingParams(top_k=1, max_tokens=3, ignore_eos=True))[0].outputs[0]
    assert (ignored.token_ids[0], len(ignored.token_ids), ignored.finish_reason) == (eos, 3, "length")


@pytest.mark.parametrize("prompt", ["", " ".join(["w1"] * 32)])
def test_a_prompt_without_room_is_refused(checkpoint, prompt):
    llm = StandInLLM(checkpoint, max_model_len=32)
    assert llm.llm_engine.model_config.max_model_len == 32
    with pytest.raises(UsageError, match="max_model_len"):
        llm.generate([prompt], GREEDY)


def test_images_are_refused(checkpoint):
    with pytest.raises(UsageError, match="multi_modal_data"):
        engine(checkpoint).generate([{"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}], GREEDY)


def test_the_global_random_state_is_untouched(checkpoint):
    before = torch.get_rng_state()
    llm = engine(checkpoint)
    llm.generate(["w1 w2"], SamplingParams(max_tokens=5))
    llm.collective_rpc("reload_weights")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_engine_dtype_is_its_own(checkpoint):
    single, half = engine(checkpoint), engine(checkpoint, dtype=torch.bfloat16)
    assert weights(half).module.dtype == torch.bfloat16
    pairs = [llm.generate(["w1 w2 w3"], GREEDY)[0].outputs[0] for llm in (single, half)]
    assert pairs[0].token_ids[0] == pairs[1].token_ids[0]
    params = SamplingParams(max_tokens=1, logprobs=0)
    logps = [
        next(iter(llm.generate(["w1 w2 w3"], params)[0].outputs[0].logprobs[0].values())) for llm in (single, half)
    ]
    assert logps[0].logprob != logps[1].logprob
    assert logps[0].logprob == pytest.approx(logps[1].logprob, abs=0.2)


# -- the engine's own copy of the weights ----------------------------------------------------------------------------


def answers(llm):
    return llm.generate(["w1 w2 w3"], GREEDY)[0].outputs[0].token_ids


def other_weights():
    return [(name, p.data) for name, p in tiny_model(seed=9).named_parameters()]


def test_weight_sync_is_followed_and_copies(checkpoint, tmp_path):
    llm, target = engine(checkpoint), StandInLLM(str(save_tiny(tmp_path / "m", seed=9)))
    assert answers(llm) != answers(target)
    new = other_weights()
    assert weights(llm).load_weights(new) == {name for name, _ in new}
    assert answers(llm) == answers(target)
    for _, tensor in new:
        tensor.zero_()
    assert answers(llm) == answers(target)


def test_stale_weights_stay_wholly_or_by_name(checkpoint):
    before = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    stale, partly = engine(checkpoint, stale=True), engine(checkpoint, stale=("lm_head",))
    for llm in (stale, partly):
        weights(llm).load_weights(other_weights())
    assert all(torch.equal(value, before[name]) for name, value in weights(stale).module.state_dict().items())
    same = {name for name, value in weights(partly).module.state_dict().items() if torch.equal(value, before[name])}
    assert "lm_head.weight" in same
    assert "model.embed_tokens.weight" not in same


def test_an_unknown_parameter_is_named(checkpoint):
    with pytest.raises(KeyError, match="no_such"):
        weights(engine(checkpoint)).load_weights([("no_such.weight", torch.zeros(1))])


def test_reload_weights_reads_the_checkpoint_again(checkpoint):
    llm = engine(checkpoint)
    first = answers(llm)
    weights(llm).load_weights(other_weights())
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    assert answers(llm) != first
    llm.collective_rpc("reload_weights")
    assert llm.reset_prefix_cache()
    assert answers(llm) == first


# -- in place of vLLM ------------------------------------------------------------------------------------------------


def test_names_and_environment_are_as_before(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    trainer_module = importlib.import_module("trl.trainer.grpo_trainer")
    try:
        generation = importlib.import_module("trl.generation.vllm_generation")
    except ModuleNotFoundError:
        generation = trainer_module
    before = dict(vars(trainer_module)), dict(vars(generation))

    def inside():
        with stand_in_engine():
            assert generation.is_vllm_available()
            assert generation.SamplingParams is SamplingParams
            os.environ["LOCAL_RANK"], os.environ["MASTER_PORT"] = "0", "2"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        inside()
    assert (dict(vars(trainer_module)), dict(vars(generation))) == before
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["MASTER_PORT"] == "1"


RATIO = "sampling/importance_sampling_ratio/"


def train(tmp_path, *, top_p=1.0, steps=3, seed=0, settings=None, **overrides):
    """A short real run of TRL's own path on the stand-in engine; returns the trainer, its engine and its logs."""
    reset_accelerate()
    with quiet(), stand_in_engine(seed=seed, **(settings or {})) as engines:
        trainer = build_trainer(tmp_path, steps=steps, seed=seed, live="reference", top_p=top_p, **overrides)
        trainer.train()
    reset_accelerate()
    (llm,) = engines
    return trainer, llm, [log for log in trainer.state.log_history if "grad_norm" in log]


def test_with_full_support_trls_own_ratio_is_one_while_the_weights_move(tmp_path):
    trainer, llm, logs = train(tmp_path, learning_rate=1e-3)
    assert len(logs) == 3
    for log in logs:
        assert log[RATIO + "min"] == pytest.approx(1, abs=1e-3)
        assert log[RATIO + "max"] == pytest.approx(1, abs=1e-3)
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
        assert log["grad_norm"] > 0
    initial = AutoModelForCausalLM.from_pretrained(llm.model.path).state_dict()
    moved = trainer.model.state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(moved, initial["model.embed_tokens.weight"])


def test_with_top_p_trls_token_ratio_is_the_kept_mass(tmp_path):
    _, _, logs = train(tmp_path, top_p=0.8, vllm_importance_sampling_mode="token_truncate")
    for log in logs:
        assert log[RATIO + "min"] > 0.8 - 1e-4
        assert log[RATIO + "mean"] == pytest.approx(0.801, abs=2e-3)
        assert log[RATIO + "max"] < 0.83


def test_a_lost_weight_sync_shows_in_trls_ratio_after_the_first_step(tmp_path):
    mode = {"vllm_importance_sampling_mode": "token_truncate", "learning_rate": 1e-2}
    _, _, logs = train(tmp_path, settings={"stale": True}, **mode)
    assert logs[0][RATIO + "max"] == pytest.approx(1, abs=1e-3)
    assert logs[-1]["sampling/sampling_logp_difference/mean"] > 0.05


def test_a_bf16_engine_shows_as_a_spread_of_the_token_ratio(tmp_path):
    settings = {"dtype": torch.bfloat16}
    _, _, logs = train(tmp_path, settings=settings, steps=1, vllm_importance_sampling_mode="token_truncate")
    assert logs[0][RATIO + "min"] < 0.99
    assert logs[0][RATIO + "max"] > 1.01
    assert logs[0][RATIO + "mean"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kind", ["conversational", "peft"])
def test_trls_own_ratio_is_one_for_chats_and_merged_adapters(tmp_path, kind):
    reset_accelerate()
    prompts = [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(16)]
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False) if kind == "peft" else None
    with quiet(), stand_in_engine(seed=0):
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(str(save_tiny(tmp_path / "m"))),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=str(tmp_path / "t"),
                max_steps=2,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                learning_rate=1e-2,
                use_vllm=True,
                vllm_mode="colocate",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tiny_tokenizer(),
            peft_config=lora,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    reset_accelerate()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert len(logs) == 2
    for log in logs:
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
        assert log[RATIO + "mean"] == pytest.approx(1, abs=1e-3)
