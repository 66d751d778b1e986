"""One micro-batch, from capture to record: the head pass, the shadow paths, the gap and its causes.

Every stage runs under the guard: what fails is recorded as unavailable, and the rest goes on.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch

from driftscope import algebra, is_ratio
from driftscope.batch import Coefficients, TokenBatch
from driftscope.config import DriftscopeConfig
from driftscope.hooks import adapters
from driftscope.hooks.canary import Canary
from driftscope.hooks.capsules import Capsules
from driftscope.hooks.capture import MicroBatch
from driftscope.hooks.compare import Comparison, Paths
from driftscope.hooks.correct import FusedHead
from driftscope.hooks.costs import PathCalls, measure_costs
from driftscope.hooks.deep import DeepWindow
from driftscope.hooks.guard import Guard
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, causal_lm
from driftscope.hooks.headpass import HeadPass, Heads
from driftscope.hooks.refused import refusal
from driftscope.hooks.rescore import Tokens
from driftscope.hooks.shadow import LigerPath, reference_algebra
from driftscope.hooks.sharding import split_weights
from driftscope.mismatch import figures, measure_mismatch
from driftscope.profiles import load_profile, violations
from driftscope.ranks.share import Local
from driftscope.records import IsRatio, PathRecord, StepRecord, ViolationRecord
from driftscope.spec import LossSpec
from driftscope.spectrum import solve_heads

FINITE_INPUTS = (
    "advantages", "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps",
    "importance_sampling_ratio", "num_items_in_batch",
)  # fmt: skip


class Probe:
    """Analyses the micro-batches of one trainer."""

    def __init__(self, trainer: Any, config: DriftscopeConfig, guard: Guard) -> None:
        self.trainer = trainer
        self.config = config
        self.guard = guard
        self.inner = causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        self.live = "corrected" if config.mode == "correct" else adapters.own_path(trainer)
        self.spec: LossSpec | None = None
        self.liger: LigerPath | None = None
        self.fused: FusedHead | None = None
        self.heads = Heads(trainer, self.inner, config)
        self.deep = DeepWindow(trainer, guard, self.heads.rows, config)
        self.canary = Canary(trainer, config)
        self.profile = load_profile(config.profile)
        self.noise: float | None = None  # of a token's log-prob, as the canary last measured it
        self.capsules = Capsules(trainer, config, self.heads)

    def analyse(self, batch: MicroBatch, record: StepRecord) -> StepRecord:
        """Fill the record of one captured micro-batch."""
        run, inputs = self.guard.run, batch.inputs
        record.paths[self.live] = PathRecord(
            loss=float(batch.loss) if batch.loss is not None else None, source="measured"
        )
        if inputs is None:
            record.unavailable["capture"] = "the loss was not computed through compute_loss"
            return record
        local = batch.local
        local.sequences = int(inputs["completion_mask"].shape[0])
        run("counts", count_tokens, inputs, record)
        spec = run("config", adapters.spec_from_trainer, self.trainer, inputs, bonus=batch.entropy_coef)
        if spec is None:
            return record
        self.spec = spec
        run("is_ratio", self._ratio, spec, inputs, record, local)
        if record.tier == "light":
            return record
        why = adapters.over_processes(self.trainer, spec)
        several = self.trainer.accelerator.num_processes > 1
        if several and batch.rank_mean_tokens is None and self.live == "liger":
            why = "the live path divides by the mean of the ranks' token counts, and they are not known to each other"
        if why is not None:
            record.unavailable["head"] = why
            return record
        passed = run("head", self.heads.take, batch, spec, record)
        if passed is not None:
            with self.heads.whole():
                self._compare(batch, spec, passed, record)
        run("profile", self.limits, record)
        return record

    def limits(self, record: StepRecord) -> None:
        """The limits of the configured profile that the mismatch crosses, the measured noise allowed for."""
        if record.mismatch is None:
            return
        if record.canary is not None:
            self.noise = max(record.canary.noise_floor or 0.0, record.canary.bf16_noise or 0.0)
        crossed = violations(record.mismatch, self.profile, self.noise, first_step=record.step == 1)
        record.violations = [
            ViolationRecord(
                limit=v.limit, figure=v.figure, value=v.value, allowed=v.allowed, nominal=v.nominal, source=v.source
            )
            for v in crossed
        ]

    def _ratio(self, spec: LossSpec, inputs: adapters.Inputs, record: StepRecord, local: Local) -> None:
        if not spec.is_correction:
            return
        if inputs.get("sampling_per_token_logps") is None or inputs.get("old_per_token_logps") is None:
            record.is_ratio = IsRatio(mode=spec.is_mode, note="the batch carries no old or no sampling log-probs")
            record.unavailable["is_ratio"] = "the batch carries no old or no sampling log-probs"
            return
        shell = adapters.batch_from_inputs(inputs, inputs["old_per_token_logps"], None)
        log_ratio = algebra.raw_log_ratio_BT(spec, shell)
        record.is_ratio = is_ratio.describe_ratio(
            spec, log_ratio, adapters.policy_mask(inputs), inputs.get("importance_sampling_ratio")
        )
        if record.tier != "light":
            self.guard.run("mismatch", self._mismatch, spec, inputs, record, local)

    def _mismatch(self, spec: LossSpec, inputs: adapters.Inputs, record: StepRecord, local: Local) -> None:
        """All figures of the mismatch between trainer and engine, in one pass and one copy to the host."""
        local.mismatch = measure_mismatch(
            inputs["old_per_token_logps"],
            inputs["sampling_per_token_logps"],
            adapters.policy_mask(inputs),
            applied=inputs.get("importance_sampling_ratio"),
            applied_level="sequence" if spec.is_mode.startswith("sequence") else "token",
            cap=spec.is_cap,
            floor=spec.is_floor,
        )
        record.mismatch = figures(local.mismatch)

    def _compare(self, batch: MicroBatch, spec: LossSpec, passed: HeadPass, record: StepRecord) -> None:
        run, scene, inputs = self.guard.run, passed.scene, batch.inputs
        assert inputs is not None
        tokens = scene.batches[MODEL_HEAD]
        paths = Paths(
            live=self.live,
            measured=solve_heads(scene.spectrum),
            reference=run("reference", self._reference, batch, tokens),
            liger=self._liger(batch, spec, passed, record),
            oracle=run("oracle", scene.coefficients, spec, MODEL_HEAD),
        )
        comparison = Comparison(spec, scene, paths, self.heads.transform, passed.dtype)
        run("attribution", comparison.fill, record, scatter=self.config.scatter_points)
        batch.local.explanation = comparison.explanation
        if record.is_ratio is not None and passed.kept_N is not None:
            run("kept_mass", self._explain_ratio, spec, passed, record, batch.local)
        if self.config.canary_tokens and record.is_ratio is not None and self.canary.due(record.step):
            run("canary", self._canary, inputs, passed, record)
        if record.tier == "deep":
            if self.liger is not None and paths.liger is not None:
                run("fused_call", self._fused_call, batch, passed, paths.liger, record)
            run("corrected", self._corrected, batch, passed, paths, record)
            views = self.heads.views
            run("param_norm", self.deep.add, batch, passed, paths, comparison, views, spec.temperature, record)
        run("capsule", self.capsules.offer, inputs, spec, passed, paths, self.liger, record)

    def _reference(self, batch: MicroBatch, tokens: TokenBatch) -> Coefficients:
        assert batch.inputs is not None
        assert tokens.entropies_BT is not None
        return reference_algebra(
            self.trainer, batch.inputs, tokens.logps_BT, tokens.entropies_BT, bonus=batch.entropy_coef
        )

    def _liger(self, batch: MicroBatch, spec: LossSpec, passed: HeadPass, record: StepRecord) -> Coefficients | None:
        """Liger's own algebra, or ``None`` with the reason on record where it cannot be had."""
        inputs = batch.inputs
        if "liger" in self.guard.off or inputs is None:
            return None
        view = passed.scene.batches.get(RAW_HEAD, passed.scene.batches[MODEL_HEAD])
        why = refusal(self.trainer, spec) if adapters.own_path(self.trainer) != "liger" else None
        if self.trainer.accelerator.num_processes > 1 and batch.rank_mean_tokens is None:
            why = "its normaliser is reduced over all processes, and the ranks' token counts are not known here"
        try:
            if why is None:
                self.liger = self.liger or LigerPath(self.trainer, self.inner)
                with self.liger.alone(inputs, batch.rank_mean_tokens):
                    return self.liger.algebra(inputs, view.logps_BT, passed.hidden_BTD)
        except ImportError as error:
            why = f"Liger-Kernel is not installed ({error})"
        except (ValueError, NotImplementedError) as error:
            why = f"Liger's loss refuses this configuration: {error}"
        except Exception as error:  # noqa: BLE001 - as every stage under the guard
            self.guard.fail("liger", error)
        record.paths.setdefault("liger", PathRecord(note=why, source="algebra"))
        return None

    def _explain_ratio(self, spec: LossSpec, passed: HeadPass, record: StepRecord, local: Local) -> None:
        assert record.is_ratio is not None
        assert passed.kept_N is not None
        shell = passed.scene.batches[MODEL_HEAD]
        log_ratio = algebra.raw_log_ratio_BT(spec, shell)[passed.scene.rows_BT]
        local.kept = is_ratio.sum_kept_mass(log_ratio, passed.kept_N)
        if local.kept is not None:
            is_ratio.truncated_support(record.is_ratio, local.kept)

    def _canary(self, inputs: adapters.Inputs, passed: HeadPass, record: StepRecord) -> None:
        """Which weights, and which sampling settings, the engine's log-probs agree with."""
        why = split_weights(self.trainer)
        if why is not None:
            record.unavailable["canary"] = f"the weights cannot be put back and forth in one process: {why}"
            return

        def logits_of(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = tokens.of(passed.hidden_BTD)
            with torch.no_grad():
                logits = self.heads.logits[MODEL_HEAD](hidden)
            return logits, tokens.of(inputs["completion_ids"])

        self.canary.look(inputs, logits_of, record)

    def _fused_call(self, batch: MicroBatch, passed: HeadPass, shadow: Coefficients, record: StepRecord) -> None:
        """Liger's real fused call on the captured hidden states, against its own algebra through the raw head."""
        inputs = batch.inputs
        assert self.liger is not None
        assert inputs is not None
        with self.liger.alone(inputs, batch.rank_mean_tokens):
            loss, grad_BTD = self.liger.fused_call(inputs, passed.hidden_BTD)
        name = RAW_HEAD if RAW_HEAD in passed.scene.spectrum.views else MODEL_HEAD
        path = record.paths.setdefault("liger", PathRecord(loss=loss))
        path.fused_call_error = self.heads.error(passed, inputs, grad_BTD, name, shadow)

    def _corrected(self, batch: MicroBatch, passed: HeadPass, paths: Paths, record: StepRecord) -> None:
        """The corrected path's real call against the oracle, and what each path costs."""
        assert batch.inputs is not None
        calls = PathCalls(self.trainer, self.inner, batch.inputs, passed.hidden_BTD, batch.entropy_coef)
        self.fused = self.fused or FusedHead(self.trainer)
        if self.live != "corrected" and paths.oracle is not None:
            loss, grad_BTD = calls.corrected(self.fused)
            record.paths["corrected"] = PathRecord(
                loss=loss,
                hidden_grad_norm=float(torch.linalg.vector_norm(grad_BTD, dtype=torch.float64)),
                normalizer=record.paths["oracle"].normalizer if "oracle" in record.paths else None,
                coef_error=self.heads.error(passed, batch.inputs, grad_BTD, MODEL_HEAD, paths.oracle),
                source="fused_call",
            )
        if record.micro_step == 0:
            liger = self.liger if paths.liger is not None else None
            with liger.alone(batch.inputs, batch.rank_mean_tokens) if liger is not None else nullcontext():
                record.profile = measure_costs(calls, self.fused, self.heads.logits[MODEL_HEAD], liger)


def count_tokens(inputs: adapters.Inputs, record: StepRecord) -> None:
    """Trained tokens, completion tokens and the share of zero advantages; one copy to the host.

    A float64 sum of a batch's float32 numbers is finite exactly where all of them are.
    """
    mask, advantages = adapters.policy_mask(inputs), inputs["advantages"]
    checked = [n for n in FINITE_INPUTS if inputs.get(n) is not None]
    numbers = [torch.as_tensor(inputs[n], device=mask.device) for n in checked]
    counted = [mask, inputs["completion_mask"], advantages == 0, *numbers]
    sums = torch.stack([values.sum(dtype=torch.float64) for values in counted])
    tokens, completion, zero, *totals = sums.tolist()
    record.tokens, record.completion_tokens = int(tokens), int(completion)
    record.zero_advantage_share = zero / advantages.numel() if advantages.numel() else math.nan
    record.nonfinite += [f"inputs.{n}" for n, total in zip(checked, totals, strict=True) if not math.isfinite(total)]
