"""The weight-sync canary: which weights does the sampling engine agree with, and what else sets it apart?

A few sampled tokens are scored under the current weights, under those of the last look at which the engine agreed,
and without the adapters. What the engine's log-probs differ by is taken apart into these and the sampling settings;
what is left is compared with the trainer's own rounding noise. Shapes: N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from driftscope import is_ratio
from driftscope.config import DriftscopeConfig
from driftscope.decompose import NOISE, Decomposition, Part, decompose
from driftscope.hooks import adapters
from driftscope.hooks.rescore import Scorer, Tokens, adapters_off, choose, has_adapters
from driftscope.hooks.weights import Snapshot, blocks, modules, size_bytes
from driftscope.records import CanaryRecord, StepRecord

AGREES: dict[str, Literal["previous", "part", "adapter_off"]] = {
    "stale_weights": "previous",
    "stale_module": "part",
    "adapter_missing": "adapter_off",
}
WEIGHT_PARTS = frozenset(AGREES)
GROWN = 1.5
"""Growth of an unexplained mismatch from which single modules, many, are tried again."""


class Canary:
    """Looks at one batch after a generation; keeps the weights at which the engine last agreed."""

    def __init__(self, trainer: Any, config: DriftscopeConfig) -> None:
        self.trainer, self.config = trainer, config
        self.scorer = Scorer(trainer)
        self.snapshot: Snapshot | None = None
        self.snapshot_step: int | None = None
        self._searched = 0.0

    def due(self) -> bool:
        """Whether the batch in hand was sampled with the weights as they are now."""
        args = self.trainer.args
        every = (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)
        # TRL counts the micro-batch before Driftscope looks at it.
        return (int(getattr(self.trainer, "_step", 1)) - 1) % every == 0

    def look(self, inputs: adapters.Inputs, logits_of: Any, record: StepRecord) -> None:
        """Fill ``record.canary`` and ``record.is_ratio.causes`` from one batch.

        logits_of: (rows, keep_BT) -> the model's own logits (N, V) of the kept tokens, and their targets (N,).
        """
        old_BT, sampled_BT = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        tokens = choose(inputs, self.config.canary_tokens)
        if tokens is None or sampled_BT is None or record.is_ratio is None:
            return
        engine = sampled_BT[tokens.rows][tokens.keep_BT].double()
        now = self.scorer.score(tokens)
        own = old_BT[tokens.rows][tokens.keep_BT].double() if old_BT is not None else now
        good = torch.isfinite(engine) & torch.isfinite(own)
        floor = _rms(self.scorer.score_otherwise(tokens) - now)
        ratio = (own - engine)[good]
        out = CanaryRecord(tokens=int(good.sum()), noise_floor=floor, own_shift=_rms(own - now))
        parts, distances = self._parts(tokens, now, engine, good, logits_of)
        found = decompose(ratio, parts, floor)
        found = self._by_block(tokens, now, good, parts, ratio, found, floor)
        out.distances = {"current": _rms((now - engine)[good]), **distances}
        self._verdict(out, found, tokens, now)
        record.canary = out
        product = [c for c in record.is_ratio.causes if c.id == "sequence_product"]
        record.is_ratio.causes = [*found.causes, *product]
        if out.agrees_with == "current":
            self._remember(record.step, out)

    # -- what may be there --------------------------------------------------------------------------------------

    def _parts(
        self, tokens: Tokens, now: Tensor, engine: Tensor, good: Tensor, logits_of: Any
    ) -> tuple[list[Part], dict[str, float]]:
        parts, distances = self._sampling_parts(tokens, now, engine, good, logits_of), {}
        if has_adapters(self.scorer.model):
            with adapters_off(self.scorer.model):
                base = self.scorer.score(tokens)
            distances["adapter_off"] = _rms((base - engine)[good])
            detail = "the engine agrees with the model without its adapters"
            parts.append(Part("adapter_missing", (now - base)[good], detail, WEIGHT_PARTS))
        if self.snapshot is not None:
            with self.snapshot.in_place():
                before = self.scorer.score(tokens)
            distances["previous"] = _rms((before - engine)[good])
            detail = f"the engine agrees with the weights of step {self.snapshot_step}"
            parts.append(Part("stale_weights", (now - before)[good], detail, WEIGHT_PARTS))
        return parts, distances

    def _sampling_parts(self, tokens: Tokens, now: Tensor, engine: Tensor, good: Tensor, logits_of: Any) -> list[Part]:
        """Truncated support and temperature, from the model's own logits of the tokens."""
        logits, targets = logits_of(tokens)
        logits, targets = logits[good].float(), targets[good]
        t = self.trainer
        heat = float(t.temperature)
        top_p, top_k, min_p = float(t.top_p), int(t.top_k or 0), float(t.min_p or 0.0)
        parts = []
        log_p = (logits / heat).log_softmax(-1)
        if top_p < 1.0 or top_k > 0 or min_p > 0.0:
            kept = is_ratio.kept_mass(log_p, top_p=top_p, top_k=top_k, min_p=min_p)
            detail = f"sampling keeps {float(kept.mean()):.4f} of the probability mass per token"
            parts.append(Part("truncated_support", kept.log(), detail))
        own = log_p.gather(-1, targets[:, None])[:, 0].double()
        for other in _temperatures(logits, targets, engine[good], heat):
            scaled = (logits / other).log_softmax(-1).gather(-1, targets[:, None])[:, 0].double()
            detail = f"the engine's log-probs are those of temperature {other:.3g}, the trainer's of {heat:.3g}"
            parts.append(Part("temperature", own - scaled, detail, frozenset({"temperature"})))
        return parts

    def _by_block(
        self,
        tokens: Tokens,
        now: Tensor,
        good: Tensor,
        parts: list[Part],
        ratio: Tensor,
        found: Decomposition,
        floor: float,
    ) -> Decomposition:
        """The same with single blocks of older weights, where more than noise is left to explain."""
        whole = next((p for p in parts if p.id == "stale_weights"), None)
        if self.snapshot is None or whole is None:
            return found
        taken = {c.id for c in found.causes}
        rest = ratio - sum(
            (p.log_ratio_N for p in parts if p.id in taken and p.id not in WEIGHT_PARTS), torch.zeros_like(ratio)
        )
        if _rms(rest) <= 3 * floor:
            return found
        groups = blocks(self.snapshot.names)
        names = self._stale_names(tokens, now, good, rest, groups)
        if set(names) == set(groups):
            return found
        if not names and _rms(rest) > GROWN * self._searched:  # a small part of a block drowns in the block
            self._searched, groups = _rms(rest), modules(self.snapshot.names)
            names = self._stale_names(tokens, now, good, rest, groups)
        if not names:
            return found
        chosen = [n for name in names for n in groups[name]]
        if len(names) == 1 and len(modules(chosen)) > 1:
            groups = modules(chosen)
            names = self._stale_names(tokens, now, good, rest, groups) or names
            chosen = [n for name in names for n in groups.get(name, chosen)]
        shift = self._shift(tokens, now, good, chosen)
        part = Part("stale_module", shift, "stale in the engine: " + ", ".join(names), WEIGHT_PARTS)
        self._searched = 0.0
        return decompose(ratio, [*parts, part], floor)

    def _stale_names(
        self, tokens: Tokens, now: Tensor, good: Tensor, rest: Tensor, groups: dict[str, list[str]]
    ) -> list[str]:
        """Groups of parameters whose older values explain the rest, chosen one by one."""
        shifts = {group: self._shift(tokens, now, good, names) for group, names in groups.items()}
        chosen: list[str] = []
        while shifts:
            best = min(shifts, key=lambda g: _rms(rest - shifts[g]))
            after = rest - shifts.pop(best)
            if _rms(after) > 0.8 * _rms(rest):
                break
            chosen.append(best)
            rest = after
        return chosen

    def _shift(self, tokens: Tokens, now: Tensor, good: Tensor, names: list[str]) -> Tensor:
        """What older values of these parameters make of the log ratio."""
        assert self.snapshot is not None
        with self.snapshot.in_place(names):
            return (now - self.scorer.score(tokens))[good]

    # -- what it means ------------------------------------------------------------------------------------------

    def _verdict(self, out: CanaryRecord, found: Decomposition, tokens: Tokens, now: Tensor) -> None:
        ids = [c.id for c in found.causes]
        out.rms, out.rest_rms = found.rms, found.rest_rms
        out.snapshot_step = self.snapshot_step
        out.agrees_with = next((AGREES[i] for i in ids if i in AGREES), "current")
        stale = next((c for c in found.causes if c.id == "stale_module"), None)
        if stale is not None and stale.detail:
            out.stale_modules = stale.detail.partition(": ")[2].split(", ")
        if out.noise_floor is not None and found.rest_rms > 3 * out.noise_floor:
            out.bf16_noise = _rms(self.scorer.score_coarsely(tokens) - now)
            noise = next(c for c in found.causes if c.id == NOISE)
            coarse = found.rest_rms <= 3 * out.bf16_noise
            noise.detail = (
                f"{found.rest_rms:.2g} nats a token (rms), {found.rest_rms / max(out.noise_floor, 1e-30):.0f} times "
                f"the trainer's own rounding noise; bfloat16 in this model makes {out.bf16_noise:.2g}"
                + (": the engine computes in a coarser number format" if coarse else "")
            )

    def _remember(self, step: int, out: CanaryRecord) -> None:
        size = size_bytes(self.scorer.model)
        if size > self.config.canary_bytes:
            out.note = (
                f"older weights are not kept: a copy takes {size / 2**30:.1f} GiB, canary_bytes allows "
                f"{self.config.canary_bytes / 2**30:.1f} GiB"
            )
            return
        self.snapshot, self.snapshot_step = Snapshot(self.scorer.model), step


def _temperatures(logits: Tensor, targets: Tensor, engine: Tensor, heat: float) -> list[float]:
    """Temperatures that the engine may have used in place of the configured one: the best fit, 1 (raw log-probs)."""

    def miss(log_t: float) -> float:
        scaled = (logits / math.exp(log_t)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return float((scaled.double() - engine).square().mean())

    low, high = math.log(0.05), math.log(20.0)
    grid = [low + (high - low) * i / 24 for i in range(25)]
    start = min(range(25), key=lambda i: miss(grid[i]))
    a, b = grid[max(start - 1, 0)], grid[min(start + 1, 24)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(24):
        c, d = b - golden * (b - a), a + golden * (b - a)
        a, b = (a, d) if miss(c) < miss(d) else (c, b)
    fitted = math.exp((a + b) / 2)
    found = [fitted] if abs(math.log(fitted / heat)) > 0.01 else []
    return [*found, 1.0] if abs(math.log(heat)) > 0.01 else found


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
