"""One micro-batch, from capture to record: the head pass, the shadow paths, the gap and its causes.

Every stage runs under the guard: what fails is recorded as unavailable, and the rest goes on.
Shapes: B sequences, T completion tokens, N rows of the head pass, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftscope import algebra, is_ratio
from driftscope.attribute import Scene
from driftscope.batch import Coefficients, TokenBatch
from driftscope.config import DriftscopeConfig
from driftscope.hooks import adapters
from driftscope.hooks.capture import MicroBatch
from driftscope.hooks.compare import Comparison, Paths
from driftscope.hooks.deep import DeepWindow
from driftscope.hooks.guard import Guard
from driftscope.hooks.head import (
    MODEL_HEAD,
    RAW_HEAD,
    HeadTransform,
    causal_lm,
    measure_transform,
    model_head,
    raw_head,
)
from driftscope.hooks.refused import refusal
from driftscope.hooks.shadow import LigerPath, reference_algebra
from driftscope.records import PathRecord, StepRecord
from driftscope.spec import LossSpec
from driftscope.spectrum import Head, Spectrum, measure, solve, tile_rows


FINITE_INPUTS = ("advantages", "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")


@dataclass(frozen=True)
class HeadPass:
    """The measured side of one micro-batch."""

    scene: Scene
    hidden_BTD: Tensor
    grad_BTD: Tensor  # unscaled
    kept_N: Tensor | None
    dtype: torch.dtype


class Probe:
    """Analyses the micro-batches of one trainer."""

    def __init__(self, trainer: Any, config: DriftscopeConfig, guard: Guard) -> None:
        self.trainer = trainer
        self.config = config
        self.guard = guard
        self.inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        self.live = adapters.live_path(trainer)
        self.spec: LossSpec | None = None
        self.transform: HeadTransform | None = None
        self.liger: LigerPath | None = None
        self.deep = DeepWindow(trainer, guard, self.rows)
        self.heads: dict[str, Head] = {
            MODEL_HEAD: model_head(self.inner, lambda: adapters.autocast(trainer)),
            RAW_HEAD: raw_head(self.inner, lambda: adapters.autocast(trainer)),
        }

    def rows(self) -> int:
        """Tokens of one logits tile within the workspace budget."""
        return tile_rows(self.inner.get_output_embeddings().weight.shape[0], self.config.workspace_bytes)

    def analyse(self, batch: MicroBatch, record: StepRecord) -> StepRecord:
        """Fill the record of one captured micro-batch."""
        run, inputs = self.guard.run, batch.inputs
        record.paths[self.live] = PathRecord(
            loss=float(batch.loss) if batch.loss is not None else None, source="measured"
        )
        if inputs is None:
            record.unavailable["capture"] = "the loss was not computed through compute_loss"
            return record
        run("counts", count_tokens, inputs, record)
        spec = run("config", adapters.spec_from_trainer, self.trainer, inputs, bonus=batch.entropy_coef)
        if spec is None:
            return record
        self.spec = spec
        run("is_ratio", self._ratio, spec, inputs, record)
        if record.tier == "light":
            return record
        passed = run("head", self._head_pass, batch, spec, record)
        if passed is not None:
            self._compare(batch, spec, passed, record)
        return record

    def _ratio(self, spec: LossSpec, inputs: adapters.Inputs, record: StepRecord) -> None:
        if not spec.is_correction:
            return
        if inputs.get("sampling_per_token_logps") is None or inputs.get("old_per_token_logps") is None:
            record.unavailable["is_ratio.raw"] = "the batch carries no old or sampling log-probs"
            return
        shell = adapters.batch_from_inputs(inputs, inputs["old_per_token_logps"], None)
        log_ratio = algebra.raw_log_ratio_BT(spec, shell)
        record.is_ratio = is_ratio.describe_ratio(
            spec, log_ratio, adapters.policy_mask(inputs), inputs.get("importance_sampling_ratio")
        )

    def _head_pass(self, batch: MicroBatch, spec: LossSpec, record: StepRecord) -> HeadPass | None:
        captured, inputs = batch.completion(), batch.inputs
        if captured is None or inputs is None:
            record.unavailable["head"] = "no hidden gradient reached the backbone's output in this micro-batch"
            return None
        hidden_BTD, grad_BTD = captured
        grad_BTD = grad_BTD.float() / adapters.loss_scale(self.trainer)
        rows_BT = inputs["completion_mask"].bool() | (grad_BTD != 0).any(-1)
        if not bool(rows_BT.any()):
            record.unavailable["head"] = "the batch trains on no token"
            return None
        hidden_ND, targets_N = hidden_BTD[rows_BT], inputs["completion_ids"][rows_BT]
        dtype = adapters.compute_dtype(self.trainer, hidden_BTD)
        if self.transform is None:
            self.transform = measure_transform(
                self.inner, self.heads[MODEL_HEAD], self.heads[RAW_HEAD], hidden_ND, dtype
            )
        record.head = self.transform.as_dict()
        heads = {k: h for k, h in self.heads.items() if k == MODEL_HEAD or not self.transform.plain}
        kept, chosen = self._kept(rows_BT, adapters.policy_mask(inputs).bool())
        spectrum = measure(
            heads,
            hidden_ND,
            targets_N,
            grad_BTD[rows_BT],
            temperature=spec.temperature,
            rows=self.rows(),
            entropy=spec.entropy_coef != 0.0,
            kept=kept,
            kept_rows=chosen,
        )
        scene = Scene(batches=self._batches(spectrum, rows_BT, inputs), spectrum=spectrum, rows_BT=rows_BT)
        return HeadPass(scene, hidden_BTD, grad_BTD, spectrum.kept_mass_N, dtype)

    def _kept(self, rows_BT: Tensor, policy_BT: Tensor) -> tuple[Any, Tensor | None]:
        """The kept-mass function of the configured sampling, and the rows it is computed on."""
        t = self.trainer
        top_p, top_k, min_p = float(t.top_p), int(t.top_k or 0), float(t.min_p or 0.0)
        limit = self.config.kept_mass_tokens
        if (top_p >= 1.0 and top_k <= 0 and min_p <= 0.0) or limit == 0:
            return None, None
        policy_N = policy_BT[rows_BT]
        order = policy_N.cumsum(0) - 1
        stride = max(1, -(-int(policy_N.sum()) // limit))
        return (
            lambda log_p: is_ratio.kept_mass(log_p, top_p=top_p, top_k=top_k, min_p=min_p),
            policy_N & (order % stride == 0),
        )

    def _batches(self, spectrum: Spectrum, rows_BT: Tensor, inputs: adapters.Inputs) -> dict[str, TokenBatch]:
        old = inputs.get("old_per_token_logps")
        out = {}
        for name, view in spectrum.views.items():
            logps_BT = old.to(view.logps_N.dtype).clone() if old is not None else _zeros(rows_BT, view.logps_N)
            logps_BT[rows_BT] = view.logps_N
            entropies_BT = _zeros(rows_BT, view.entropies_N)
            entropies_BT[rows_BT] = view.entropies_N
            out[name] = adapters.batch_from_inputs(inputs, logps_BT, entropies_BT)
        return out

    def _compare(self, batch: MicroBatch, spec: LossSpec, passed: HeadPass, record: StepRecord) -> None:
        run, scene, inputs = self.guard.run, passed.scene, batch.inputs
        assert inputs is not None
        tokens = scene.batches[MODEL_HEAD]
        paths = Paths(
            live=self.live,
            measured={name: solve(scene.spectrum, name) for name in scene.spectrum.views},
            reference=run("reference", self._reference, batch, tokens),
            liger=self._liger(inputs, spec, passed, record),
            oracle=run("oracle", scene.coefficients, spec, MODEL_HEAD),
        )
        comparison = Comparison(spec, scene, paths, self.transform or HeadTransform(), passed.dtype)
        run("attribution", comparison.fill, record, scatter=self.config.scatter_points)
        if record.is_ratio is not None and passed.kept_N is not None:
            run("kept_mass", self._explain_ratio, spec, passed, record)
        if record.tier == "deep":
            if self.liger is not None and paths.liger is not None:
                run("fused_call", self._fused_call, inputs, passed, paths.liger, record)
            why = adapters.sharded(self.trainer)
            if why is not None:
                record.unavailable["param_norm"] = f"full-parameter norms need whole gradients in one process: {why}"
            else:
                run("param_norm", self.deep.add, batch, passed, paths, comparison, self.heads, spec.temperature)

    def _reference(self, batch: MicroBatch, tokens: TokenBatch) -> Coefficients:
        assert batch.inputs is not None
        assert tokens.entropies_BT is not None
        return reference_algebra(
            self.trainer, batch.inputs, tokens.logps_BT, tokens.entropies_BT, bonus=batch.entropy_coef
        )

    def _liger(
        self, inputs: adapters.Inputs, spec: LossSpec, passed: HeadPass, record: StepRecord
    ) -> Coefficients | None:
        """Liger's own algebra, or ``None`` with the reason on record where it cannot be had."""
        if "liger" in self.guard.off:
            return None
        view = passed.scene.batches.get(RAW_HEAD, passed.scene.batches[MODEL_HEAD])
        why = refusal(self.trainer, spec) if self.live != "liger" else None
        try:
            if why is None:
                self.liger = self.liger or LigerPath(self.trainer, self.inner)
                return self.liger.algebra(inputs, view.logps_BT, passed.hidden_BTD)
        except ImportError as error:
            why = f"Liger-Kernel is not installed ({error})"
        except (ValueError, NotImplementedError) as error:
            why = f"Liger's loss refuses this configuration: {error}"
        except Exception as error:  # noqa: BLE001 - as every stage under the guard
            self.guard.fail("liger", error)
        record.paths.setdefault("liger", PathRecord(note=why, source="algebra"))
        return None

    def _explain_ratio(self, spec: LossSpec, passed: HeadPass, record: StepRecord) -> None:
        assert record.is_ratio is not None
        assert passed.kept_N is not None
        shell = passed.scene.batches[MODEL_HEAD]
        log_ratio = algebra.raw_log_ratio_BT(spec, shell)[passed.scene.rows_BT]
        is_ratio.truncated_support(record.is_ratio, log_ratio, passed.kept_N)

    def _fused_call(self, inputs: adapters.Inputs, passed: HeadPass, shadow: Coefficients, record: StepRecord) -> None:
        """Liger's real fused call on the captured hidden states, against its own algebra through the raw head."""
        assert self.liger is not None
        loss, grad_BTD = self.liger.fused_call(inputs, passed.hidden_BTD)
        rows, scene = passed.scene.rows_BT, passed.scene
        name = RAW_HEAD if RAW_HEAD in scene.spectrum.views else MODEL_HEAD
        spectrum = measure(
            {name: self.heads[name]},
            passed.hidden_BTD[rows],
            inputs["completion_ids"][rows],
            grad_BTD[rows],
            temperature=float(self.trainer.temperature),
            rows=self.rows(),
        )
        c_N = shadow.logps_BT[rows].double()
        view = spectrum.views[name]
        left = (spectrum.gg_N - 2 * c_N * view.gu_N + c_N * c_N * view.uu_N).clamp(min=0).sum()
        size = (c_N * c_N * view.uu_N).sum()
        path = record.paths.setdefault("liger", PathRecord(loss=loss))
        path.fused_call_error = float((left / size).sqrt()) if float(size) > 0 else None


def count_tokens(inputs: adapters.Inputs, record: StepRecord) -> None:
    """Trained tokens, completion tokens and the share of zero advantages; one copy to the host."""
    mask, advantages = adapters.policy_mask(inputs), inputs["advantages"].double()
    checked = [n for n in FINITE_INPUTS if inputs.get(n) is not None]
    row = torch.stack(
        [
            mask.sum().double(),
            inputs["completion_mask"].sum().double(),
            (advantages == 0).double().mean(),
            *(torch.isfinite(inputs[n]).all().double() for n in checked),
        ]
    )
    tokens, completion, zero, *finite = row.tolist()
    record.tokens, record.completion_tokens, record.zero_advantage_share = int(tokens), int(completion), zero
    record.nonfinite += [f"inputs.{n}" for n, good in zip(checked, finite, strict=True) if not good]


def _zeros(like_BT: Tensor, dtype_of: Tensor) -> Tensor:
    return torch.zeros(like_BT.shape, dtype=dtype_of.dtype, device=dtype_of.device)
