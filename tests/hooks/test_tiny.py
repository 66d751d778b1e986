from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from driftscope.errors import UsageError
from driftscope.hooks.tiny import save_tiny, tiny_model, tiny_reward_model, tiny_tokenizer, words

ARCHS = ("qwen2", "llama", "gemma2", "cohere", "mistral", "gpt2")
REWARD_ARCHS = tuple(arch for arch in ARCHS if arch != "cohere")


@pytest.mark.parametrize("arch", ARCHS)
def test_same_arguments_same_weights_and_the_global_random_state_untouched(arch):
    before = torch.get_rng_state()
    first, again, other = tiny_model(arch, seed=3), tiny_model(arch, seed=3), tiny_model(arch, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    states = [m.state_dict() for m in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    assert {p.dtype for p in first.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arch", "head"),
    [
        ("qwen2", lambda z, c: z),
        ("llama", lambda z, c: z),
        ("gemma2", lambda z, c: c.final_logit_softcapping * torch.tanh(z / c.final_logit_softcapping)),
        ("cohere", lambda z, c: c.logit_scale * z),
        ("mistral", lambda z, c: z),
        ("gpt2", lambda z, c: z),
    ],
)
def test_the_head_transforms_the_logits_as_its_architecture_does(arch, head):
    model = tiny_model(arch).eval()
    with torch.no_grad():
        out = model(input_ids=torch.arange(8)[None], output_hidden_states=True)
        expected = head(model.lm_head(out.hidden_states[-1]), model.config)
    torch.testing.assert_close(out.logits, expected)
    plain = model.lm_head(out.hidden_states[-1])
    assert torch.allclose(out.logits, plain, rtol=1e-3) == (arch not in ("gemma2", "cohere"))


@pytest.mark.parametrize("arch", REWARD_ARCHS)
def test_a_reward_model_answers_one_number_a_sequence(arch):
    before = torch.get_rng_state()
    first, again = tiny_reward_model(arch, seed=3), tiny_reward_model(arch, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.score.weight, again.score.weight)
    assert {p.dtype for p in first.parameters()} == {torch.float32}
    assert first.config.num_labels == 1
    with torch.no_grad():
        assert first(input_ids=torch.arange(8).reshape(2, 4)).logits.shape == (2, 1)
    assert tiny_reward_model(arch, num_labels=3, vocab=64).score.out_features == 3


def test_an_architecture_without_a_reward_class_is_refused():
    with pytest.raises(UsageError, match=r"cohere.*no class for AutoModelForSequenceClassification"):
        tiny_reward_model("cohere")


def test_overrides_reach_the_configuration():
    model = tiny_model("qwen2", num_hidden_layers=1, tie_word_embeddings=True, vocab=64)
    assert model.config.num_hidden_layers == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (64, 64)


def test_saved_and_loaded_it_is_the_same_model_and_tokenizer(tmp_path):
    path = save_tiny(tmp_path / "m", "llama", seed=1)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.name_or_path == str(path)
    for name, value in tiny_model("llama", seed=1).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    assert tokenizer("w1 w20 nonsense")["input_ids"] == [1, 20, tokenizer.unk_token_id]


def test_every_id_survives_decoding_and_encoding():
    tokenizer = tiny_tokenizer(64)
    ids = list(range(64))
    assert len(tokenizer) == 64
    assert tokenizer(tokenizer.decode(ids, skip_special_tokens=False))["input_ids"] == ids


def test_padding_is_on_the_left_and_special_ids_match_the_model():
    tokenizer, model = tiny_tokenizer(), tiny_model()
    batch = tokenizer(["w1", "w1 w2 w3"], padding=True)
    assert batch["attention_mask"][0] == [0, 0, 1]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (model.config.pad_token_id, model.config.eos_token_id)


def test_the_chat_template_is_prefix_preserving():
    tokenizer = tiny_tokenizer()
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "tool", "content": "w3"},
    ]
    short = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    long = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert long.startswith(short)
    assert tokenizer.unk_token_id not in tokenizer(long)["input_ids"]


def test_what_cannot_be_built_is_refused_with_the_reason():
    with pytest.raises(UsageError, match="qwen2, llama, gemma2, cohere"):
        tiny_model("gpt9")
    with pytest.raises(UsageError, match="no room for words"):
        words(8)
