"""The head in plain PyTorch, all logits at once: what every fused path is judged against. Any dtype."""

from __future__ import annotations

from torch import Tensor

from driftscope.kernels.head import HeadTransform, check_inputs, statistics_dtype


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies in nats, both (N,), differentiable by autograd.

    hidden (N, D), weight (V, D), bias (V,), targets (N,). Holds several (N, V) arrays. The product is in the inputs'
    dtype; what follows is in at least float32, as in TRL.
    """
    check_inputs(hidden, weight, targets, bias)
    transform = HeadTransform(temperature=temperature, softcap=softcap, logit_scale=logit_scale)
    raw = hidden @ weight.t()
    wide = raw.to(statistics_dtype(raw.dtype))
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    log_p = transform.logits(wide).log_softmax(-1)
    logps = log_p.gather(-1, targets[:, None]).squeeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1)
