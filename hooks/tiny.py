"""Tiny random language and reward models and a word-level tokenizer, built locally, for the demo and the tests.

Nothing is downloaded, and the global random state is left as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

from driftscope.errors import UsageError

Arch = Literal["qwen2", "llama", "gemma2", "cohere", "mistral", "gpt2"]
SPECIAL = ("<pad>", "<eos>", "<unk>")
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
MIN_VOCAB = 16

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # logits spread over several nats: neither uniform nor peaked
    "bos_token_id": None,
}
# GPT-2 has its own names, learnt positions, and neither a gate nor grouped heads.
_GPT2_SHAPE: dict[str, Any] = {
    "n_embd": 64,
    "n_inner": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "attn_pdrop": 0.0,  # no dropout, as in the others
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
}
# What sets an architecture apart: how its head turns hidden states into logits.
_HEAD: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "mistral": {"sliding_window": None},
    "gpt2": {},
}


def words(vocab: int = 512) -> int:
    """Number of plain words ``w0 w1 ...`` in a vocabulary of this size; their ids are their numbers."""
    if vocab < MIN_VOCAB:
        raise UsageError(f"vocab={vocab} leaves no room for words beside the special tokens; use {MIN_VOCAB} or more.")
    return vocab - len(SPECIAL) - len(ROLES)


def tiny_tokenizer(vocab: int = 512) -> Any:
    """A word-level tokenizer with left padding and a prefix-preserving chat template.

    Words are separated by spaces: ``w0 w1 ...``, then the roles, then padding, end and unknown.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*(f"w{i}" for i in range(words(vocab))), *ROLES, *SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(arch: Arch = "qwen2", seed: int = 0, vocab: int = 512, **config: Any) -> Any:
    """A random causal language model in float32, the same for the same arguments.

    arch: ``gemma2`` caps its final logits, ``cohere`` scales them. config: overrides of the model's configuration.
    Raises ``UsageError`` for an unknown architecture.
    """
    from transformers import AutoModelForCausalLM

    return _built(AutoModelForCausalLM, arch, seed, vocab, config)


def tiny_reward_model(
    arch: Arch = "qwen2", seed: int = 0, num_labels: int = 1, *, vocab: int = 512, **config: Any
) -> Any:
    """A random sequence classification model in float32, as RewardTrainer takes it: logits (B, num_labels).

    The same for the same arguments. config: overrides of the model's configuration; its ``initializer_range`` is 0.02
    here, the usual one. Raises ``UsageError`` for an unknown architecture and for one that transformers has no
    sequence classification class for (cohere).
    """
    from transformers import AutoModelForSequenceClassification

    settings = {"initializer_range": 0.02, **config, "num_labels": num_labels}
    return _built(AutoModelForSequenceClassification, arch, seed, vocab, settings)


def _built(auto: Any, arch: str, seed: int, vocab: int, config: dict[str, Any]) -> Any:
    """The random model of one of transformers' auto classes."""
    if arch not in get_args(Arch):
        raise UsageError(f"arch={arch!r} is not a tiny model; use one of {', '.join(get_args(Arch))}.")
    from transformers import AutoConfig

    shape = _GPT2_SHAPE if arch == "gpt2" else _SHAPE
    special = {"vocab_size": vocab, "pad_token_id": vocab - 3, "eos_token_id": vocab - 2}
    made = AutoConfig.for_model(arch, **{**shape, **special, **_HEAD[arch], **config})
    if type(made) not in auto._model_mapping:
        raise UsageError(
            f"arch={arch!r}: transformers has no class for {auto.__name__}; use an architecture that has one, such as "
            "qwen2, llama, gemma2, mistral or gpt2."
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only: torch.manual_seed would seed devices as well
        return auto.from_config(made, dtype=torch.float32)


def save_tiny(directory: str | Path, arch: Arch = "qwen2", seed: int = 0, vocab: int = 512, **config: Any) -> Path:
    """Write model and tokenizer to a directory that ``from_pretrained`` reads; returns it."""
    path = Path(directory)
    tiny_model(arch, seed, vocab, **config).save_pretrained(path)
    tiny_tokenizer(vocab).save_pretrained(path)
    return path
