"""A real trainer on a tiny model with a synthetic batch, and the hidden gradient that its real step sends.

Shapes: B sequences, P prompt tokens, T completion tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftscope.algebra import coefficients, importance_ratio
from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.hooks import adapters
from driftscope.hooks.capture import Capture, MicroBatch
from driftscope.hooks.demo import NO_TRITON, even_words
from driftscope.hooks.doctor.features import PLAIN, Feature, Variant
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, backbone_name, causal_lm, model_head, raw_head
from driftscope.hooks.tiny import Arch, save_tiny, tiny_model, tiny_tokenizer
from driftscope.kernels.liger import layer_kernels_off
from driftscope.spec import LossSpec
from driftscope.spectrum import Head, score

VOCAB = 96
PROMPTS = (6, 4, 5, 6)  # tokens
COMPLETIONS = (12, 7, 10, 5)  # tokens: no two sequences are of one length
ADVANTAGES = (1.2, -0.8, 0.6, -1.1)
TOOL_TOKENS = ((1, 2, 4), (2, 3, 7))  # sequence, first, end: tool results, which nobody sampled
UNEVEN = 1.6  # tokens of an average micro-batch of the window / tokens of this one
MISMATCH = 0.8
"""Mean importance sampling ratio a token, geometric: what top_p=0.8 was measured to give with vLLM."""
SPREAD = 0.25  # standard deviation of log ratios, nats
ARCH: dict[Variant, Arch] = {"plain": "qwen2", "softcap": "gemma2", "scale": "cohere", "adapter": "qwen2"}


@dataclass(frozen=True)
class Step:
    """What one real training step of a trainer did to the synthetic batch."""

    spec: LossSpec  # as the trainer's settings say
    inputs: dict[str, Any]
    hidden_BTD: Tensor
    grad_BTD: Tensor  # float64
    heads: dict[str, Head]

    def expected(self, spec: LossSpec, head: str) -> Tensor:
        """The hidden gradient (B, T, D) of a spec, its coefficients in float64, through one of the heads."""
        rows_BT = self.inputs["completion_mask"].bool()
        hidden_ND = self.hidden_BTD[rows_BT].detach().requires_grad_(True)
        targets_N = self.inputs["completion_ids"][rows_BT]
        logps_N, entropies_N = score(self.heads[head], hidden_ND, targets_N, spec.temperature)
        u_ND, w_ND = (torch.autograd.grad(x.sum(), hidden_ND, retain_graph=True)[0] for x in (logps_N, entropies_N))
        batch = self._batch(rows_BT, logps_N.detach(), entropies_N.detach())
        made = coefficients(spec, batch)
        out_BTD = torch.zeros_like(self.grad_BTD)
        out_ND = made.logps_BT[rows_BT][:, None] * u_ND.double()
        if made.entropies_BT is not None:
            out_ND = out_ND + made.entropies_BT[rows_BT][:, None] * w_ND.double()
        out_BTD[rows_BT] = out_ND
        return out_BTD

    def _batch(self, rows_BT: Tensor, logps_N: Tensor, entropies_N: Tensor) -> TokenBatch:
        full = []
        for values in (logps_N, entropies_N):
            whole = torch.zeros(rows_BT.shape, dtype=values.dtype)
            whole[rows_BT] = values
            full.append(whole)
        batch = adapters.batch_from_inputs(self.inputs, full[0], full[1])
        return dataclasses.replace(batch, tool_mask_BT=self.inputs.get("tool_mask"))


class Rig:
    """Builds trainers for features, in a scratch directory; models are made once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._models: dict[Variant, Any] = {}

    def step(self, feature: Feature, path: str) -> Step:
        """Build the real trainer of a feature on a path, and run one training step on the synthetic batch.

        Raises whatever TRL, Liger or PEFT raise.
        """
        settings = known({**PLAIN, **feature.settings})
        trainer = self._trainer(feature, settings, liger=path == "liger")
        inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        heads = {
            name: Head(make(inner, lambda: adapters.autocast(trainer)))
            for name, make in ((MODEL_HEAD, model_head), (RAW_HEAD, raw_head))
        }
        inputs = self._inputs(feature, trainer)
        captured = _train_once(trainer, inner, inputs)
        spec = adapters.spec_from_trainer(trainer, inputs)
        return Step(spec, inputs, captured[0], captured[1].double(), heads)

    def _trainer(self, feature: Feature, settings: dict[str, Any], *, liger: bool) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        engine = bool(settings.get("use_vllm", False))
        if liger:
            settings |= {
                "use_liger_kernel": True,
                "liger_kernel_config": NO_TRITON | layer_kernels_off(ARCH[feature.variant]),
            }
        args = GRPOConfig(
            output_dir=str(self.directory / "trainer"),
            per_device_train_batch_size=len(COMPLETIONS),
            num_generations=len(COMPLETIONS),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        args.use_vllm = False  # GRPOConfig has judged it; no engine is needed for a loss
        trainer = GRPOTrainer(
            model=self._model(feature.variant),
            reward_funcs=even_words,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2"] * 4}),
            processing_class=_tokenizer(),
        )
        trainer.use_vllm = args.use_vllm = engine
        if feature.tools:
            trainer.tools = [len]
        for name in adapters.LIGER_LOSS:
            if hasattr(module := getattr(trainer, name, None), "compiled"):
                module.compiled = False  # type: ignore[union-attr]
        return trainer

    def _model(self, variant: Variant) -> Any:
        return copy.deepcopy(self._made(variant))

    def _made(self, variant: Variant) -> Any:
        if variant not in self._models:
            arch = ARCH[variant]
            small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
            model = tiny_model(arch, vocab=VOCAB, **small)
            # TRL loads the reference model of a run with beta from there
            model.config._name_or_path = str(save_tiny(self.directory / arch, arch, vocab=VOCAB, **small))
            self._models[variant] = _with_head_adapter(model) if variant == "adapter" else model
        return self._models[variant]

    @torch.no_grad()
    def _logps(self, variant: Variant, inputs: dict[str, Any], temperature: float) -> Tensor:
        """Log-probs (B, T) of the batch under the model as it is."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logits = self._made(variant)(input_ids=ids, attention_mask=mask).logits.float()
        length = inputs["completion_ids"].shape[1]
        wanted = torch.log_softmax(logits[:, -length - 1 : -1] / temperature, -1)
        return wanted.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)

    def _inputs(self, feature: Feature, trainer: Any) -> dict[str, Any]:
        """The batch as TRL's ``_generate_and_score_completions`` returns it, for the trainer's settings."""
        spec = _batch_spec(trainer)
        inputs = _tokens()
        mask_BT = inputs["completion_mask"]
        noise = torch.Generator().manual_seed(11)

        def normal(spread: float) -> Tensor:
            return spread * torch.randn(mask_BT.shape, generator=noise)

        logps_BT = self._logps(feature.variant, inputs, spec.temperature)
        log_ratio_BT = normal(SPREAD)
        drift_BT = torch.log(torch.tensor(MISMATCH)) + normal(SPREAD)
        if spec.delta is not None:
            log_ratio_BT[1, 2:4] = log_ratio_BT[3, 1] = torch.log(torch.tensor(1.5 * spec.delta))
        old_BT = logps_BT - log_ratio_BT
        inputs["old_per_token_logps"] = old_BT
        inputs["ref_per_token_logps"] = logps_BT + normal(2 * SPREAD)
        if feature.tools:
            inputs["tool_mask"] = _tool_mask(mask_BT)
        if spec.off_policy_threshold is not None:  # the last sequence has drifted, the others have not
            drift_BT = drift_BT - (logps_BT - old_BT)
            drift_BT[-1] -= 2 * spec.off_policy_threshold + 1.0
        if spec.is_correction or spec.off_policy_threshold is not None:
            inputs["sampling_per_token_logps"] = old_BT - drift_BT
        if spec.is_correction:
            ratio = importance_ratio(spec, adapters.batch_from_inputs(inputs, logps_BT, None))
            inputs["importance_sampling_ratio"] = ratio.float()
        steps = spec.steps_per_generation or spec.accumulation_steps
        share = UNEVEN if feature.uneven else 1.0
        tokens = int(adapters.policy_mask(inputs).sum())
        inputs["num_items_in_batch"] = torch.tensor(round(share * tokens * steps))
        return inputs


def _batch_spec(trainer: Any) -> LossSpec:
    """The terms that the batch must carry; of a loss type that the oracle does not know as well."""
    try:
        return adapters.spec_from_trainer(trainer, {})
    except UsageError:
        return adapters.spec_from_trainer(adapters.stand_in(trainer, loss_type="dapo"), {})


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that the installed GRPOConfig has."""
    fields = setting_names()
    return {name: value for name, value in settings.items() if name in fields}


@cache
def setting_names() -> frozenset[str]:
    """Names of the installed GRPOConfig's fields."""
    from trl import GRPOConfig

    return frozenset(f.name for f in dataclasses.fields(GRPOConfig))


@cache
def _tokenizer() -> Any:
    return tiny_tokenizer(VOCAB)


def _tokens() -> dict[str, Any]:
    """Token ids, masks and advantages."""
    draw = torch.Generator().manual_seed(7)
    sequences, longest, prompt = len(COMPLETIONS), max(COMPLETIONS), max(PROMPTS)
    ids = torch.randint(0, VOCAB - 7, (sequences, prompt + longest), generator=draw)
    at = torch.arange(longest)
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": (torch.arange(prompt) >= prompt - torch.tensor(PROMPTS)[:, None]).long(),
        "completion_ids": ids[:, prompt:],
        "completion_mask": (at < torch.tensor(COMPLETIONS)[:, None]).long(),
        "advantages": torch.tensor(ADVANTAGES),
    }


def _tool_mask(mask_BT: Tensor) -> Tensor:
    tool_mask = mask_BT.clone()
    for sequence, first, end in TOOL_TOKENS:
        tool_mask[sequence, first:end] = 0
    return tool_mask


def _with_head_adapter(model: Any) -> Any:
    """LoRA on the output head, with weights that are not zero: an adapter that has been trained for a while."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return adapted


def _train_once(trainer: Any, inner: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Hidden states and hidden gradient (B, T, D) of one real ``training_step``, its scaling included."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._prepare_inputs = lambda given: given  # the batch is made already
    capture = Capture(inner._modules[backbone_name(inner)], torch.device("cpu"))
    micro = MicroBatch("spectrum", inputs=inputs)
    capture.current = micro
    try:
        trainer.training_step(trainer.model, dict(inputs), inputs["num_items_in_batch"])
    finally:
        capture.remove()
        del trainer._prepare_inputs
    captured = micro.completion()
    if captured is None:
        raise LookupError("no hidden gradient reached the backbone's output")
    return captured
