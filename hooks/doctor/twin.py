"""A small trainer of the user's own configuration: TRL's real one, around a shrunk random copy of the model.

So that what depends on structure alone (which parameters get a gradient, what the head is) is measured before the run.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driftscope.doctor.facts import Settings
from driftscope.errors import UsageError
from driftscope.hooks.demo import prompts
from driftscope.hooks.doctor.isolation import isolated
from driftscope.hooks.doctor.settings import ELSEWHERE, dataclasses_of
from driftscope.hooks.doctor.shrink import VOCAB, save_shrunk
from driftscope.hooks.tiny import tiny_tokenizer

NO_TRITON = dict.fromkeys(
    ("rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"), False
)
# A few sequences and no devices, files or services; what bears on loss and gradients stays as configured.
SMALL: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "bf16": False,
    "fp16": False,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "optim": "adamw_torch",
    "optim_args": None,
    "neftune_noise_alpha": None,
    "dataset_num_proc": None,
    "auto_find_batch_size": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "log_completions": False,
    "log_completions_hub_repo": None,
}
SMALL_GRPO: dict[str, Any] = {
    "num_generations": 2,
    "num_generations_eval": None,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "max_completion_length": 8,
    "use_vllm": False,
    "use_transformers_paged": False,
    "use_transformers_continuous_batching": False,
    "cache_implementation": None,
}
SMALL_REWARD: dict[str, Any] = {"max_length": 64}


@contextmanager
def build_twin(settings: Settings, directory: Path) -> Iterator[Any]:
    """TRL's trainer of this configuration on a shrunk random copy of its model, for use inside.

    The model is read from the local directory that ``model_name_or_path`` names; adapters are TRL's own
    ``get_peft_config`` of the settings; checkpointing, loss, KL and dtype are as configured. On the CPU, without a
    sampling engine, mixed precision or quantisation, with two sequences a batch. directory: where the copy is written.
    Process-wide state is as before on leaving.
    Raises ``UsageError`` where the model is not local or cannot be shrunk, for another trainer than grpo or reward,
    and whatever TRL raises for the configuration.
    """
    if settings.trainer not in ("grpo", "reward"):
        raise UsageError(f"a twin of trl {settings.trainer} is not built: only grpo and reward are.")
    path = settings.get("model_name_or_path")
    if not path:
        raise UsageError("no model is named: set model_name_or_path or give --model DIR.")
    with isolated(keep_accelerate=False):
        model_path = save_shrunk(str(path), directory / "model")
        arguments = _arguments(settings, directory)
        tokenizer = _tokenizer(str(path))
        make = _grpo if settings.trainer == "grpo" else _reward
        yield make(settings, str(model_path), arguments, tokenizer)


def _arguments(settings: Settings, directory: Path) -> dict[str, Any]:
    """The configured fields of TRL's configuration class, made small."""
    config = _config_class(settings.trainer)
    own = {field.name for field in dataclasses.fields(config)}
    small = SMALL | (SMALL_GRPO if settings.trainer == "grpo" else SMALL_REWARD)
    given = {
        name: copy.deepcopy(settings.values[name])
        for name in settings.given & own
        if name not in ELSEWHERE and name in settings.values
    }
    if settings.get("use_liger_kernel"):
        small = small | {"liger_kernel_config": NO_TRITON}  # Liger's kernels for the model need a GPU
    kwargs = dict(given.get("model_init_kwargs") or {}) if isinstance(given.get("model_init_kwargs"), dict) else {}
    kept = {name: kwargs[name] for name in ("attn_implementation", "dtype") if name in kwargs}
    kept.setdefault("dtype", settings.get("dtype", "float32"))
    if str(kept.get("attn_implementation") or "eager") not in ("eager", "sdpa"):
        kept.pop("attn_implementation")  # flash kernels need a GPU
    wanted = given | small | {"model_init_kwargs": kept, "output_dir": str(directory / "trainer")}
    return {name: value for name, value in wanted.items() if name in own}


def _config_class(kind: str) -> type:
    """The trainer's configuration class among the dataclasses of its command."""
    return next(cls for cls in dataclasses_of(kind) if hasattr(cls, "world_size"))


def _peft_config(settings: Settings) -> Any:
    """TRL's own PEFT configuration of these settings, without quantisation."""
    if not settings.get("use_peft"):
        return None
    from trl import ModelConfig, get_peft_config

    own = {field.name for field in dataclasses.fields(ModelConfig)}
    given = {name: copy.deepcopy(settings.values[name]) for name in settings.given & own if name in settings.values}
    given |= {"use_peft": True, "load_in_4bit": False, "load_in_8bit": False}
    return get_peft_config(ModelConfig(**given))


def _tokenizer(path: str) -> Any:
    """A tiny tokenizer, without a padding token where the model's own has none."""
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer(VOCAB)
    try:
        own = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - a directory of weights alone
        return tokenizer
    if own.pad_token is None:
        tokenizer.pad_token = None
    return tokenizer


def _grpo(settings: Settings, model: str, arguments: dict[str, Any], tokenizer: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOTrainer

    return _silent(
        GRPOTrainer(
            model=model,
            reward_funcs=_alternating,
            args=_config_class("grpo")(**arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts(8)}),
            processing_class=tokenizer,
            peft_config=_peft_config(settings),
        )
    )


def _reward(settings: Settings, model: str, arguments: dict[str, Any], tokenizer: Any) -> Any:
    from datasets import Dataset
    from trl import RewardTrainer

    texts = prompts(8)
    pairs = {"chosen": [f"{text} w1 w2" for text in texts], "rejected": [f"{text} w3" for text in texts]}
    return _silent(
        RewardTrainer(
            model=model,
            args=_config_class("reward")(**arguments),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
            peft_config=_peft_config(settings),
        )
    )


def _alternating(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within each group."""
    return [float(i % 2) for i in range(len(completions))]


def _silent(trainer: Any) -> Any:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    for name in ("liger_grpo_loss", "liger_loss"):
        if hasattr(getattr(trainer, name, None), "compiled"):
            getattr(trainer, name).compiled = False
    return trainer
