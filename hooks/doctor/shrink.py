"""A tiny random copy of a local model's architecture: the same modules, heads and transforms, fewer and smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from driftscope.errors import UsageError
from driftscope.hooks.tiny import tiny_tokenizer

VOCAB = 512
LAYERS = 2
# Sizes, where an architecture has them under these names (transformers' attribute_map gives GPT-2's).
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_inner": 128,
}
HEADS = 4
EXPERTS = 4


def local_config(path: str) -> Any:
    """The configuration of a model in a local directory or in the cache; nothing is downloaded, no remote code is run.

    Raises ``UsageError`` where there is none, or where transformers cannot read it.
    """
    from transformers import AutoConfig

    if Path(path).exists() and not Path(path).is_dir():
        raise UsageError(f"model_name_or_path={path!r} is a file; give the directory of the model.")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if Path(path).is_dir():
            raise UsageError(f"{path!r} has no configuration that transformers can read: {error}") from error
        raise UsageError(
            f"model_name_or_path={path!r} is no local directory and not in the cache of models, and driftscope "
            "downloads nothing: give the directory of the model with --model DIR to have gradient flow and head "
            "measured."
        ) from error


def shrink(config: Any) -> Any:
    """The configuration with two small layers, a vocabulary of 512 and everything else as it was.

    Raises ``UsageError`` for an architecture that is no decoder of text.
    """
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise UsageError(
            f"model_type={config.model_type!r} is no decoder of text alone; only those are shrunk and measured."
        )
    had_pad = getattr(config, "pad_token_id", None) is not None
    tokenizer = tiny_tokenizer(VOCAB)
    heads, kv_heads = getattr(config, "num_attention_heads", HEADS), getattr(config, "num_key_value_heads", None)
    wanted = {
        **SIZES,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": None if kv_heads is None else HEADS if kv_heads == heads else 1 if kv_heads == 1 else 2,
        "head_dim": SIZES["hidden_size"] // HEADS,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id if had_pad else None,
        "bos_token_id": None,
        "layer_types": _layer_types(config),
        "quantization_config": None,
    }
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        wanted[name] = EXPERTS
    wanted["num_experts_per_tok"] = 2
    for name, value in wanted.items():
        if getattr(config, name, None) is not None or (name == "pad_token_id" and had_pad):
            setattr(config, name, value)
    _drop_long_rope(config)
    if getattr(config, "quantization_config", None) is None and "quantization_config" in vars(config):
        del config.quantization_config
    return config


def _layer_types(config: Any) -> list[str] | None:
    """Two layer kinds, each that the architecture has while there is room."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return None
    different = list(dict.fromkeys(kinds))[:LAYERS]
    return (different * LAYERS)[:LAYERS]


def _drop_long_rope(config: Any) -> None:
    """Tables of the rotary embedding that are as long as the head is wide."""
    for name in ("rope_scaling", "rope_parameters"):
        table = getattr(config, name, None)
        if isinstance(table, dict) and any(isinstance(value, list) for value in table.values()):
            kept = {"rope_type": "default"}
            if "rope_theta" in table:
                kept["rope_theta"] = table["rope_theta"]
            setattr(config, name, kept if name == "rope_parameters" else None)


def save_shrunk(path: str, directory: Path) -> Path:
    """Write a shrunk random copy of the model in ``path``, with a tiny tokenizer, to a directory; returns it.

    Raises ``UsageError`` where the model is not local or cannot be shrunk.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = shrink(local_config(path))
    classifies = any("SequenceClassification" in str(name) for name in config.architectures or ())
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = auto.from_config(config, dtype=config.dtype or torch.float32)
    except Exception as error:
        raise UsageError(
            f"model_type={config.model_type!r} cannot be shrunk: its small copy raises {type(error).__name__}: {error}"
        ) from error
    model.save_pretrained(directory)
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.save_pretrained(directory)
    return directory
