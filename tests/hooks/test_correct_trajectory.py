"""Two hundred steps in the correct mode and on TRL's own path: the same reward curve; and no bias in the gradients."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import pytest
import torch

from driftscope.hooks.scope import attach
from driftscope.kernels import fused_linear_logprobs
from tests.hooks.runs import HAS_LIGER_LOSS, trainer

STEPS = 200


def rewards(tmp_path: Any, mode: str) -> list[float]:
    options: dict[str, Any] = {"max_steps": STEPS, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    correct = mode == "correct"
    with trainer(tmp_path / mode, liger=correct and HAS_LIGER_LOSS, learning_rate=1e-3, **options) as made:
        if correct:
            with attach(made, tmp_path / "run", mode="correct", spectrum_every=0, deep_every=0, console=False):
                made.train()
        else:
            made.train()
        return [entry["reward"] for entry in made.state.log_history if "reward" in entry]


@pytest.mark.slow
def test_the_reward_curve_is_the_references(tmp_path: Any) -> None:
    corrected, reference = rewards(tmp_path, "correct"), rewards(tmp_path, "reference")
    assert len(corrected) == len(reference) == STEPS
    assert corrected[:5] == pytest.approx(reference[:5], abs=1e-6)  # the very same samples at first
    blocks = [slice(i, i + 40) for i in range(0, STEPS, 40)]
    for block in blocks:  # rounding parts the samples later; the curve stays
        noise = statistics.stdev(reference[block]) / 40**0.5
        difference = statistics.fmean(corrected[block]) - statistics.fmean(reference[block])
        assert abs(difference) < max(5 * noise, 0.05), block
    assert statistics.fmean(corrected[-40:]) > statistics.fmean(corrected[:10]) + 0.1  # it does learn
    assert statistics.fmean(reference[-40:]) > statistics.fmean(reference[:10]) + 0.1


def gradients(hidden: torch.Tensor, weight: torch.Tensor, coefs: torch.Tensor, score: Any) -> list[torch.Tensor]:
    h, w = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True)
    return list(torch.autograd.grad((score(h, w).double() * coefs.double()).sum(), [h, w]))


@pytest.mark.slow
def test_the_gradients_have_no_bias() -> None:
    """Signed differences from plain PyTorch in bfloat16, over 200 batches: their mean is within three standard errors.

    Each is the difference's projection on the float64 truth, relative to its square: a gradient that is always a
    little short shows here long before it shows in the size of a single error. Logits that are rounded to bfloat16
    make both paths about 3e-5 short; that is no difference between them. Summing the weight's gradient in bfloat16 is.
    """
    n, d, v, chunk = 96, 32, 301, 8
    signed: dict[str, list[float]] = {"hidden": [], "weight": [], "weight summed in bfloat16": []}
    for seed in range(STEPS):
        g = torch.Generator().manual_seed(seed)
        hidden = torch.randn(n, d, generator=g).bfloat16()
        weight = (torch.randn(v, d, generator=g) * 0.3).bfloat16()
        targets, coefs = torch.randint(0, v, (n,), generator=g), torch.randn(n, generator=g) / n

        def plain(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor = targets) -> torch.Tensor:
            logits = h @ w.T
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return wide.log_softmax(-1).gather(-1, y[:, None])[:, 0]

        def fused(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor = targets) -> torch.Tensor:
            return fused_linear_logprobs(h, w, y)[0]

        truth = gradients(hidden.double(), weight.double(), coefs, plain)
        theirs, ours = gradients(hidden, weight, coefs, plain), gradients(hidden, weight, coefs, fused)
        parts = []
        for i in range(0, n, chunk):
            part = slice(i, i + chunk)
            score = partial(plain, y=targets[part])
            parts.append(gradients(hidden[part], weight, coefs[part], score))
        narrow = torch.zeros_like(weight)
        for part in parts:
            narrow += part[1]
        for name, mine, other, exact in (
            ("hidden", ours[0], theirs[0], truth[0]),
            ("weight", ours[1], theirs[1], truth[1]),
            ("weight summed in bfloat16", narrow, theirs[1], truth[1]),
        ):
            signed[name].append(float(((mine.double() - other.double()) * exact).sum() / exact.square().sum()))
    for name in ("hidden", "weight"):
        mean, error = statistics.fmean(signed[name]), statistics.stdev(signed[name]) / STEPS**0.5
        assert abs(mean) < 3 * error, (name, mean, error)
        assert error < 1e-6
    assert statistics.stdev(signed["weight summed in bfloat16"]) > 10 * statistics.stdev(signed["weight"])
