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
from driftscope.decompose import NOISE, ROUNDING, Decomposition, Part, decompose
from driftscope.hooks import adapters
from driftscope.hooks.rescore import Scorer, Tokens, adapters_off, choose, has_adapters
from driftscope.hooks.tokenizers import disagreements
from driftscope.hooks.weights import Snapshot, blocks, modules, size_bytes, trainable
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
        self.tokenizer: list[str] | None = None
        self._searched = 0.0
        self._looked_at: int | None = None

    def due(self, step: int) -> bool:
        """Whether the batch was sampled with the weights as they are now, and none of the step was looked at yet."""
        if step == self._looked_at:
            return False
        args = self.trainer.args
        every = (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)
        # TRL counts the micro-batch before Driftscope looks at it; the weights stay until the window's end.
        return (int(getattr(self.trainer, "_step", 1)) - 1) % every < adapters.accumulation_steps(self.trainer)

    def look(self, inputs: adapters.Inputs, logits_of: Any, record: StepRecord) -> None:
        """Fill ``record.canary`` and ``record.is_ratio.causes`` from one batch.

        logits_of: (rows, keep_BT) -> the model's own logits (N, V) of the kept tokens, and their targets (N,).
        """
        self._looked_at = record.step
        old_BT, sampled_BT = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        tokens = choose(inputs, self.config.canary_tokens)
        if tokens is None or sampled_BT is None or record.is_ratio is None:
            return
        engine = tokens.of(sampled_BT).double()
        now = self.scorer.score(tokens)
        own = tokens.of(old_BT).double() if old_BT is not None else now
        good = torch.isfinite(engine) & torch.isfinite(own)
        floor = _rms(self.scorer.score_otherwise(tokens) - now)
        ratio = (own - engine)[good]
        out = CanaryRecord(tokens=int(good.sum()), noise_floor=floor, own_shift=_rms(own - now))
        out.distances["current"] = _rms((now - engine)[good])
        if self.tokenizer is None:
            self.tokenizer = disagreements(self.trainer, inputs)
        out.tokenizer = self.tokenizer
        logits, targets = logits_of(tokens)
        logits, targets = logits[good].float(), targets[good]
        parts = self._truncation(logits)
        found = decompose(ratio, parts, floor)
        if found.rest_rms > ROUNDING * floor:  # more than rounding is left: what else may it be?
            parts += self._temperature(logits, targets, engine[good])
            parts += self._weights(tokens, now, engine, good, out)
            found = decompose(ratio, parts, floor)
            found = self._by_block(tokens, now, good, parts, ratio, found, floor)
        self._verdict(out, found, tokens, now)
        record.canary = out
        product = [c for c in record.is_ratio.causes if c.id == "sequence_product"]
        record.is_ratio.causes = [*found.causes, *product]
        if out.agrees_with == "current":
            self._remember(record.step, out)

    # -- what may be there --------------------------------------------------------------------------------------

    def _truncation(self, logits: Tensor) -> list[Part]:
        """The mass that the configured sampling keeps, from the model's own logits of the tokens."""
        t = self.trainer
        top_p, top_k, min_p = float(t.top_p), int(t.top_k or 0), float(t.min_p or 0.0)
        if top_p >= 1.0 and top_k <= 0 and min_p <= 0.0:
            return []
        log_p = (logits / float(t.temperature)).log_softmax(-1)
        kept = is_ratio.kept_mass(log_p, top_p=top_p, top_k=top_k, min_p=min_p)
        detail = f"sampling keeps {float(kept.mean()):.4f} of the probability mass per token"
        return [Part("truncated_support", kept.log(), detail)]

    def _temperature(self, logits: Tensor, targets: Tensor, engine: Tensor) -> list[Part]:
        heat = float(self.trainer.temperature)
        own = _logps(logits, targets, heat)
        return [
            Part(
                "temperature",
                own - _logps(logits, targets, other),
                f"the engine's log-probs are those of temperature {other:.3g}, the trainer's of {heat:.3g}",
                frozenset({"temperature"}),
            )
            for other in _temperatures(logits, targets, engine, heat)
        ]

    def _weights(self, tokens: Tokens, now: Tensor, engine: Tensor, good: Tensor, out: CanaryRecord) -> list[Part]:
        """The model without its adapters, and with the weights at which the engine last agreed."""
        parts = []
        if has_adapters(self.scorer.model):
            with adapters_off(self.scorer.model):
                base = self.scorer.score(tokens)
            out.distances["adapter_off"] = _rms((base - engine)[good])
            detail = "the engine agrees with the model without its adapters"
            parts.append(Part("adapter_missing", (now - base)[good], detail, WEIGHT_PARTS))
        if self.snapshot is not None:
            with self.snapshot.in_place():
                before = self.scorer.score(tokens)
            out.distances["previous"] = _rms((before - engine)[good])
            detail = f"the engine agrees with the weights of step {self.snapshot_step}"
            parts.append(Part("stale_weights", (now - before)[good], detail, WEIGHT_PARTS))
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
        if _rms(rest) <= max(ROUNDING * floor, GROWN * self._searched):
            return found
        groups = blocks(self.snapshot.names)
        names = self._stale_names(tokens, now, good, rest, groups)
        if set(names) == set(groups):
            return found
        if not names:  # a small part of a block drowns in the block
            groups = modules(self.snapshot.names)
            names = self._stale_names(tokens, now, good, rest, groups)
        if not names:
            self._searched = _rms(rest)
            return found
        chosen = [n for name in names for n in groups[name]]
        if len(names) == 1 and len(modules(chosen)) > 1:
            groups = modules(chosen)
            names = self._stale_names(tokens, now, good, rest, groups) or names
            chosen = [n for name in names for n in groups.get(name, chosen)]
        shift = self._shift(tokens, now, good, chosen)
        part = Part("stale_module", shift, "stale in the engine: " + ", ".join(names), WEIGHT_PARTS)
        self._searched = 0.0
        narrowed = decompose(ratio, [*parts, part], floor)
        whole_weights = any(c.id in WEIGHT_PARTS for c in found.causes)
        # Several blocks can always be chosen to fit a little better than all of them: only much better counts.
        return narrowed if not whole_weights or narrowed.rest_rms < 0.5 * found.rest_rms else found

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
        floor = out.noise_floor or 0.0
        if found.rest_rms <= ROUNDING * floor:
            return
        noise = next(c for c in found.causes if c.id == NOISE)
        times = f", {found.rest_rms / floor:.0f} times the trainer's own rounding noise" if floor > 0 else ""
        noise.detail = f"{found.rest_rms:.2g} nats a token (rms){times}"
        coarse = _rms(self.scorer.score_coarsely(tokens) - now)
        if coarse > ROUNDING * floor:  # the trainer computes in a finer format itself
            out.bf16_noise = coarse
            noise.detail += f"; bfloat16 in this model makes {coarse:.2g}"
            if found.rest_rms <= ROUNDING * coarse and out.agrees_with == "current":
                noise.detail += ": the engine computes in a coarser number format"

    def _remember(self, step: int, out: CanaryRecord) -> None:
        size = size_bytes(self.scorer.model)
        if size > self.config.canary_bytes:
            out.note = (
                f"older weights are not kept: a copy takes {size / 2**30:.1f} GiB, canary_bytes allows "
                f"{self.config.canary_bytes / 2**30:.1f} GiB"
            )
            return
        if self.snapshot is None or set(self.snapshot.names) != {n for n, _ in trainable(self.scorer.model)}:
            self.snapshot = Snapshot(self.scorer.model)
        else:
            self.snapshot.take()
        self.snapshot_step = step


def _logps(logits: Tensor, targets: Tensor, heat: float) -> Tensor:
    """Log-probs (N,) of the targets at a temperature, float64."""
    scaled = logits / heat
    return (scaled.gather(-1, targets[:, None])[:, 0] - scaled.logsumexp(-1)).double()


def _temperatures(logits: Tensor, targets: Tensor, engine: Tensor, heat: float) -> list[float]:
    """Temperatures that the engine may have used in place of the configured one: the best fit, 1 (raw log-probs)."""

    def miss(log_t: float) -> float:
        return float((_logps(logits, targets, math.exp(log_t)) - engine).square().mean())

    low, high = math.log(0.05), math.log(20.0)
    grid = [low + (high - low) * i / 12 for i in range(13)]
    start = min(range(13), key=lambda i: miss(grid[i]))
    a, b = grid[max(start - 1, 0)], grid[min(start + 1, 12)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(20):
        c, d = b - golden * (b - a), a + golden * (b - a)
        a, b = (a, d) if miss(c) < miss(d) else (c, b)
    fitted = math.exp((a + b) / 2)
    found = [fitted] if abs(math.log(fitted / heat)) > 0.01 else []
    return [*found, 1.0] if abs(math.log(heat)) > 0.01 else found


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
