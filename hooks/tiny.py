"""Tiny random language models and a word-level tokenizer, built locally, for the demo and the tests.

Nothing is downloaded, and the global random state is left as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

from driftscope.errors import UsageError

Arch = Literal["qwen2", "llama", "gemma2", "cohere"]
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
# What sets an architecture apart: how its head turns hidden states into logits.
_HEAD: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
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
    if arch not in get_args(Arch):
        raise UsageError(f"arch={arch!r} is not a tiny model; use one of {', '.join(get_args(Arch))}.")
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        **_SHAPE,
        "vocab_size": vocab,
        "pad_token_id": vocab - 3,
        "eos_token_id": vocab - 2,
        **_HEAD[arch],
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only: torch.manual_seed would seed devices as well
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **settings), dtype=torch.float32)


def save_tiny(directory: str | Path, arch: Arch = "qwen2", seed: int = 0, vocab: int = 512, **config: Any) -> Path:
    """Write model and tokenizer to a directory that ``from_pretrained`` reads; returns it."""
    path = Path(directory)
    tiny_model(arch, seed, vocab, **config).save_pretrained(path)
    tiny_tokenizer(vocab).save_pretrained(path)
    return path
