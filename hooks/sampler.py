"""A stand-in for vLLM's colocated engine, behind the interface that TRL calls.

For machines without vLLM. TRL stays as it is: its own code syncs the weights, scores the completions and computes the
importance sampling ratio; only the names under which it looks the engine up are replaced, and put back afterwards. The
engine holds its own copy of the model, which follows the trainer through ``load_weights`` alone, so a lost or partial
weight sync shows as it would with a real one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from driftscope.errors import UsageError
from driftscope.hooks.sampling import Sampled, SamplingParams, sample

# The vLLM version that the replaced names claim: one that TRL takes for a current one.
CLAIMED_VERSION = "0.12.0"
# Where TRL looks the engine up: TRL 0.28 and later, and before.
ENGINE_MODULES = ("trl.generation.vllm_generation", "trl.trainer.grpo_trainer")
# What TRL sets for the process group that a real engine starts.
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine differs from the trainer. The defaults differ in nothing.

    dtype: the dtype that the engine computes in; ``None`` is the checkpoint's.
    stale: ``True`` ignores every weight sync; names ignore the parameters that start with one of them.
    seed: seed of the sampling generator; ``None`` is the one that TRL passes, its process index.
    """

    dtype: torch.dtype | None = None
    stale: bool | Sequence[str] = False
    seed: int | None = None

    def ignores(self, name: str) -> bool:
        """Whether a sync of this parameter is lost."""
        if isinstance(self.stale, bool):
            return self.stale
        return name.startswith((self.stale,) if isinstance(self.stale, str) else tuple(self.stale))


@dataclass(frozen=True)
class Logprob:
    """Log-prob of one token, and its rank in the distribution that was sampled (1 is the most likely)."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``logprobs``: per token, a dict from token id to its ``Logprob``."""

    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its completions."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class EngineModel:
    """The engine's own copy of the model, loaded from a checkpoint and updated by ``load_weights`` alone."""

    def __init__(self, path: str, settings: EngineSettings) -> None:
        self.path = path
        self.settings = settings
        self.module = self._from_disk()

    def _from_disk(self) -> Any:
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_pretrained(self.path, dtype=self.settings.dtype or "auto").eval()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the given parameters; the engine moves to the device they are on. Returns the names that were loaded.

        Raises ``KeyError`` for a name that the model lacks.
        """
        loaded = set()
        for name, tensor in weights:
            if self.settings.ignores(name):
                continue
            if tensor.device != next(self.module.parameters()).device:
                self.module.to(tensor.device)
            try:
                parameter = self.module.get_parameter(name)
            except AttributeError:
                raise KeyError(f"weight sync: the engine's model has no parameter {name!r}") from None
            parameter.copy_(tensor)
            loaded.add(name)
        return loaded

    def reload_weights(self) -> None:
        """Read the checkpoint again, as the engine's collective call of that name does."""
        device = next(self.module.parameters()).device
        self.module = self._from_disk().to(device)


class StandInLLM:
    """``vllm.LLM`` as far as TRL's colocate mode uses it; other constructor arguments are taken and ignored.

    model: path of the checkpoint, with its tokenizer. max_model_len: tokens of prompt and completion, ``None`` is the
    model's own limit. seed: of the engine's own generator; the global random state is never touched.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int | None = None,
        seed: int = 0,
        settings: EngineSettings | None = None,
        **_ignored: Any,
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        self.settings = settings or EngineSettings()
        self.model = EngineModel(model, self.settings)
        # tokenizer.json as written: AutoTokenizer of transformers 5 replaces its class by the architecture's own.
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        limit = max_model_len or self.model.module.config.max_position_embeddings
        self.generator = torch.Generator().manual_seed(seed if self.settings.seed is None else self.settings.seed)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self.model))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=runner),
            model_config=SimpleNamespace(max_model_len=limit),
        )

    def generate(
        self,
        prompts: Sequence[str | Mapping[str, Any]],
        sampling_params: SamplingParams,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, or ``{"prompt_token_ids": ids}``.

        Raises ``UsageError`` for an empty prompt, one that leaves no room for a token, and for images.
        """
        limit = self.llm_engine.model_config.max_model_len
        ids = [self._token_ids(prompt) for prompt in prompts]
        for row in ids:
            if not 0 < len(row) < limit:
                raise UsageError(
                    f"The prompt has {len(row)} tokens, but the engine's context (max_model_len) is {limit}, of which "
                    "a completion needs at least one: shorten the prompt or raise vllm_max_model_length."
                )
        rows = [row for row in ids for _ in range(sampling_params.n)]
        sampled = sample(
            self.model.module,
            rows,
            sampling_params,
            stop_ids=self._stop_ids(sampling_params),
            max_model_len=limit,
            generator=self.generator,
        )
        n = sampling_params.n
        return [
            RequestOutput(row, [_output(k, s, sampling_params) for k, s in enumerate(sampled[i * n : (i + 1) * n])])
            for i, row in enumerate(ids)
        ]

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Any = None,
        **_ignored: Any,
    ) -> list[RequestOutput]:
        """Complete each conversation, rendered with the tokenizer's chat template or the one given."""
        rows = [
            self.tokenizer.apply_chat_template(
                [{**message, "content": _text(message["content"])} for message in conversation],
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **(chat_template_kwargs or {}),
            )["input_ids"]
            for conversation in messages
        ]
        return self.generate([{"prompt_token_ids": row} for row in rows], sampling_params)

    def _token_ids(self, prompt: str | Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if prompt.get("multi_modal_data"):
            raise UsageError("multi_modal_data: the stand-in engine samples text models only; use vLLM for images.")
        return list(prompt["prompt_token_ids"])

    def _stop_ids(self, params: SamplingParams) -> set[int]:
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            eos = self.model.module.generation_config.eos_token_id
            stops.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
            if self.tokenizer.eos_token_id is not None:
                stops.add(self.tokenizer.eos_token_id)
        return stops

    def collective_rpc(self, method: str, *_args: Any, **_kwargs: Any) -> list[None]:
        """``"reload_weights"`` reads the checkpoint again; other methods do nothing."""
        if method == "reload_weights":
            self.model.reload_weights()
        return [None]

    def reset_prefix_cache(self) -> bool:
        """Nothing to reset: no key-value cache outlives a call."""
        return True

    def sleep(self, level: int = 1) -> None:
        """Nothing to free."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Nothing to restore."""


def _output(index: int, sampled: Sampled, params: SamplingParams) -> CompletionOutput:
    columns = zip(sampled.token_ids, sampled.logps, sampled.ranks, strict=True)
    logprobs = None if params.logprobs is None else [{token: Logprob(lp, rank)} for token, lp, rank in columns]
    return CompletionOutput(index, sampled.token_ids, logprobs, sampled.finish_reason)


def _text(content: Any) -> str:
    """A message's text, whether its content is a string or a list of typed parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


@contextmanager
def stand_in_engine(
    *, dtype: torch.dtype | None = None, stale: bool | Sequence[str] = False, seed: int | None = None
) -> Iterator[list[StandInLLM]]:
    """Let TRL find ``StandInLLM`` where it looks for vLLM's engine, in whichever TRL is installed.

    Build the trainer *and* train inside: TRL looks up ``SamplingParams`` at every generation. Yields the list of
    engines built inside. Names and environment variables are as before on leaving. Arguments: ``EngineSettings``.
    """
    settings = EngineSettings(dtype=dtype, stale=stale, seed=seed)
    engines: list[StandInLLM] = []
    before = {name: os.environ.get(name) for name in RENDEZVOUS}

    def llm(model: str, **arguments: Any) -> StandInLLM:
        # No process group is started, and variables that announce one would mislead the next trainer.
        _restore_environment(before)
        engines.append(StandInLLM(model, settings=settings, **arguments))
        return engines[-1]

    names = {
        "LLM": llm,
        "SamplingParams": SamplingParams,
        "RequestOutput": RequestOutput,
        "StructuredOutputsParams": SimpleNamespace,
        "vllm": SimpleNamespace(__version__=CLAIMED_VERSION),
        "is_vllm_available": lambda *_args, **_kwargs: True,
    }
    undo: list[tuple[ModuleType, dict[str, Any]]] = []
    try:
        for module in _engine_modules():
            undo.append((module, {name: vars(module)[name] for name in names if name in vars(module)}))
            vars(module).update(names)
        yield engines
    finally:
        for module, originals in undo:
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(originals)
        _restore_environment(before)


def _engine_modules() -> list[ModuleType]:
    """The modules of the installed TRL that ask for vLLM themselves."""
    found = []
    for name in ENGINE_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        if hasattr(module, "is_vllm_available"):
            found.append(module)
    return found


def _restore_environment(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
