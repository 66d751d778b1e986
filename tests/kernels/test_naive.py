"""The plain head against its formula, and its derivatives against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.kernels.naive import linear_logprobs

TRANSFORMS = [
    {},
    {"temperature": 0.7},
    {"softcap": 2.0, "logit_scale": 0.3, "temperature": 1.5},
    {"logit_scale": -0.5},
]


def inputs():
    g = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 4), (7, 4), (7,)))
    return hidden, weight, bias, torch.tensor([0, 6, 2])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_one_token_against_the_formula(transform):
    hidden, weight, bias, targets = inputs()
    logps, entropies = linear_logprobs(hidden, weight, targets, bias=bias, **transform)
    z = []
    for v in range(7):
        y = (float(hidden[1] @ weight[v]) + float(bias[v])) * transform.get("logit_scale", 1.0)
        cap = transform.get("softcap")
        y = cap * math.tanh(y / cap) if cap else y
        z.append(y / transform.get("temperature", 1.0))
    total = sum(math.exp(value) for value in z)
    p = [math.exp(value) / total for value in z]
    assert float(logps[1]) == pytest.approx(math.log(p[6]), rel=1e-12)
    assert float(entropies[1]) == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_against_finite_differences(transform):
    hidden, weight, bias, targets = inputs()
    leaves = [t.requires_grad_(True) for t in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(lambda h, w, b: linear_logprobs(h, w, targets, bias=b, **transform), leaves)


def test_bf16_logits_are_widened_before_the_softmax():
    hidden, weight, _, targets = inputs()
    logps, entropies = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)
    assert logps.dtype == entropies.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "said"),
    [({"temperature": 0.0}, "temperature"), ({"softcap": -1.0}, "softcap"), ({"bias": torch.zeros(3)}, "bias")],
)
def test_what_makes_no_sense_is_refused(change, said):
    hidden, weight, _, targets = inputs()
    with pytest.raises(UsageError, match=said):
        linear_logprobs(hidden, weight, targets, **change)
