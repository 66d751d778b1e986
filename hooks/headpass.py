"""The head pass: one look at the head's output for a captured micro-batch, shared by all paths.

Shapes: B sequences, T completion tokens, N rows of the head pass, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftscope import is_ratio
from driftscope.attribute import Scene
from driftscope.batch import Coefficients, TokenBatch
from driftscope.config import DriftscopeConfig
from driftscope.hooks import adapters
from driftscope.hooks.capture import MicroBatch
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, HeadTransform, measure_transform, model_head, raw_head
from driftscope.hooks.sharding import ShardedHead, whole_shape
from driftscope.kernels import Directions, fused_linear_logprobs, linear_directions
from driftscope.kernels.directions import DirectionsOf
from driftscope.records import StepRecord
from driftscope.spec import LossSpec
from driftscope.spectrum import Head, Logits, Spectrum, measure, tile_rows


@dataclass(frozen=True)
class HeadPass:
    """The measured side of one micro-batch."""

    scene: Scene
    hidden_BTD: Tensor
    grad_BTD: Tensor  # unscaled
    kept_N: Tensor | None
    dtype: torch.dtype


class Heads:
    """The model's head as its own forward has it, and as ``lm_head.weight`` alone."""

    def __init__(self, trainer: Any, inner: Any, config: DriftscopeConfig) -> None:
        self.trainer, self.inner, self.config = trainer, inner, config
        self.transform = HeadTransform()
        self.logits: dict[str, Logits] = {
            MODEL_HEAD: model_head(inner, lambda: adapters.autocast(trainer)),
            RAW_HEAD: raw_head(inner, lambda: adapters.autocast(trainer)),
        }
        self.views = {name: Head(logits) for name, logits in self.logits.items()}
        self._checked: dict[str, bool] = {}
        self._sharded = ShardedHead(trainer, inner)

    def reserve(self) -> None:
        """What ``gather`` may lack on one rank alone, looked for without a collective; raises where it is lacking."""
        self._sharded.reserve()

    def gather(self) -> None:
        """Gather a sharded head, once a step; every rank must call it at the same place. No-op where it is whole."""
        self._sharded.gather()

    def release(self) -> None:
        """Let go of the gathered head; no collective."""
        self._sharded.release()

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model has its gathered head: everything that reads or runs the head is local and sees it."""
        return self._sharded.in_place()

    def rows(self) -> int:
        """Tokens of one logits tile within the workspace budget."""
        return tile_rows(whole_shape(self.inner.get_output_embeddings().weight)[0], self.config.workspace_bytes)

    def take(self, batch: MicroBatch, spec: LossSpec, record: StepRecord) -> HeadPass | None:
        """The head pass of a captured micro-batch, or ``None`` with the reason on record."""
        captured, inputs = batch.completion(), batch.inputs
        if captured is None or inputs is None:
            record.unavailable["head"] = "no hidden gradient reached the backbone's output in this micro-batch"
            return None
        missing = self._sharded.missing()
        if missing is not None:
            record.unavailable["head"] = missing
            return None
        with self.whole():
            return self._measured(batch, *captured, spec, record)

    def _measured(
        self, batch: MicroBatch, hidden_BTD: Tensor, grad_BTD: Tensor, spec: LossSpec, record: StepRecord
    ) -> HeadPass | None:
        inputs = batch.inputs
        assert inputs is not None
        grad_BTD = grad_BTD.float() / adapters.loss_scale(self.trainer)
        rows_BT = inputs["completion_mask"].bool() | (grad_BTD != 0).any(-1)
        if not bool(rows_BT.any()):
            record.unavailable["head"] = "the batch trains on no token"
            return None
        hidden_ND, targets_N = hidden_BTD[rows_BT], inputs["completion_ids"][rows_BT]
        dtype = adapters.compute_dtype(self.trainer, hidden_BTD)
        self._look(hidden_ND, targets_N, dtype)
        record.head = self.transform.as_dict()
        heads = {k: h for k, h in self.views.items() if k == MODEL_HEAD or not self.transform.plain}
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
        scene = Scene(batches=self._batches(spectrum, rows_BT, batch), spectrum=spectrum, rows_BT=rows_BT)
        return HeadPass(scene, hidden_BTD, grad_BTD, spectrum.kept_mass_N, dtype)

    def _look(self, hidden_ND: Tensor, targets_N: Tensor, dtype: torch.dtype) -> None:
        """Measure the head's transform, and choose the fast way where it is known.

        At every pass: an adapter on the head starts at zero and grows. The fast way is checked against the measured
        head once.
        """
        own, raw = self.logits[MODEL_HEAD], self.logits[RAW_HEAD]
        self.transform = measure_transform(self.inner, own, raw, hidden_ND, dtype)
        self.views = {name: Head(logits) for name, logits in self.logits.items()}
        for name, known in ((MODEL_HEAD, self.transform.joined), (RAW_HEAD, True)):
            quick = Head(self.logits[name], self._fused(name), self._directions(name))
            if known and self._agrees(name, quick, hidden_ND[:16], targets_N[:16], dtype):
                self.views[name] = quick

    def _fused(self, name: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The fused way through ``lm_head.weight``, with the measured transform for the model's own head."""
        transform = self.transform if name == MODEL_HEAD else HeadTransform()

        def fused(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            lm_head = self.inner.get_output_embeddings()
            with adapters.autocast(self.trainer):
                logps, entropies = fused_linear_logprobs(
                    hidden, lm_head.weight, targets, with_entropy=True, **self._settings(lm_head, transform)
                )
            assert entropies is not None
            return logps, entropies

        return fused

    def _directions(self, name: str) -> DirectionsOf:
        """The way to the directions through ``lm_head.weight``, which asks for no gradient of it."""
        transform = self.transform if name == MODEL_HEAD else HeadTransform()

        def directions(hidden: Tensor, targets: Tensor, entropy: bool) -> Directions:
            lm_head = self.inner.get_output_embeddings()
            with adapters.autocast(self.trainer):
                return linear_directions(
                    hidden, lm_head.weight, targets, with_entropy=entropy, **self._settings(lm_head, transform)
                )

        return directions

    def _settings(self, lm_head: Any, transform: HeadTransform) -> dict[str, Any]:
        """How the kernels read the head; room for two rows at least."""
        return {
            "bias": getattr(lm_head, "bias", None),
            "temperature": float(self.trainer.temperature),
            "softcap": transform.softcap,
            "logit_scale": transform.scale,
            "workspace_bytes": max(self.config.workspace_bytes, lm_head.weight.shape[0] * 16),
        }

    @torch.no_grad()
    def _agrees(self, name: str, quick: Head, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> bool:
        """Whether the fast way gives the log-probs of the measured head, on a few tokens; looked at once."""
        if name not in self._checked:
            assert quick.fused is not None
            logits = quick.logits(hidden).double() / float(self.trainer.temperature)
            wanted = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
            found = quick.fused(hidden, targets)[0].double()
            size = 1.0 + float(logits.abs().max())
            self._checked[name] = float((found - wanted).abs().max()) <= 8 * torch.finfo(dtype).eps * size
        return self._checked[name]

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

    def _batches(self, spectrum: Spectrum, rows_BT: Tensor, batch: MicroBatch) -> dict[str, TokenBatch]:
        assert batch.inputs is not None
        inputs = batch.inputs
        old = inputs.get("old_per_token_logps")
        out = {}
        for name, view in spectrum.views.items():
            logps_BT = old.to(view.logps_N.dtype).clone() if old is not None else _zeros(rows_BT, view.logps_N)
            logps_BT[rows_BT] = view.logps_N
            entropies_BT = _zeros(rows_BT, view.entropies_N)
            entropies_BT[rows_BT] = view.entropies_N
            out[name] = adapters.batch_from_inputs(
                inputs, logps_BT, entropies_BT, rank_mean_tokens=batch.rank_mean_tokens
            )
        return out

    def error(
        self, passed: HeadPass, inputs: adapters.Inputs, grad_BTD: Tensor, head: str, wanted: Coefficients
    ) -> float | None:
        """Relative difference of a hidden gradient from the one that coefficients make in a head's directions."""
        rows = passed.scene.rows_BT
        e_N = wanted.entropies_BT[rows].double() if wanted.entropies_BT is not None else None
        with self.whole():
            spectrum = measure(
                {head: self.views[head]},
                passed.hidden_BTD[rows],
                inputs["completion_ids"][rows],
                grad_BTD[rows],
                temperature=float(self.trainer.temperature),
                rows=self.rows(),
                entropy=e_N is not None,
            )
        c_N, view = wanted.logps_BT[rows].double(), spectrum.views[head]
        size = spectrum.squared_N(head, c_N, e_N)
        left = spectrum.gg_N - 2 * c_N * view.gu_N + size
        if e_N is not None and view.gw_N is not None:
            left = left - 2 * e_N * view.gw_N
        total = float(size.sum())
        return float((left.clamp(min=0).sum() / total).sqrt()) if total > 0 else None


def _zeros(like_BT: Tensor, dtype_of: Tensor) -> Tensor:
    return torch.zeros(like_BT.shape, dtype=dtype_of.dtype, device=dtype_of.device)
