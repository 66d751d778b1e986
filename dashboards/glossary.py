"""The words of the report, for a reader who meets them for the first time."""

from __future__ import annotations

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "Loss path",
        "A piece of code that turns the same batch into a loss and a gradient. TRL has its own (the reference); "
        "Liger has a "
        "fused one that saves memory. They should agree. The path that trains is the one whose gradient moves the "
        "weights.",
    ),
    (
        "Candidate and reference",
        "The two paths that are compared. The reference is not assumed to be right: both are also judged against "
        "the oracle.",
    ),
    (
        "Oracle, corrected",
        "The oracle is the configured loss, written from its formula and computed in float64. The corrected path "
        "is Driftscope's "
        "own fused path, which keeps every configured term.",
    ),
    (
        "Token coefficient",
        "c = dL/dlogp: how hard the loss pushes the probability of one sampled token. Everything that a loss adds "
        "on top of the "
        "model (advantages, clipping, ratios, masks, normaliser) ends up in these numbers, so two paths are equal "
        "exactly when "
        "their coefficients are.",
    ),
    (
        "Hidden gradient norm",
        "sqrt(sum |dL/dh|²), the size of the gradient that enters the model at its last hidden states. It scales "
        "with the "
        "gradient over all parameters, and can be had without a second pass through the model.",
    ),
    (
        "Gap",
        "Gradient norm of the candidate divided by that of the reference. 1× means that they agree.",
    ),
    (
        "Noise floor",
        "The difference that rounding alone makes on this hardware and dtype, measured in the run: relative for a "
        "gradient; in nats a token for log-probs, where the same tokens are scored twice with another batch split and "
        "another order of attention.",
    ),
    (
        "Importance sampling ratio",
        "Probability of the sampled text under the model that is trained, divided by its probability under the "
        "sampling engine. It "
        "corrects for a sampler that is not quite the same model. Raw is before, applied is after truncation or "
        "masking.",
    ),
    (
        "Kept mass",
        "The probability that top_p, top_k or min_p leaves in the running. A sampler that reports log-probs "
        "renormalised over "
        "what it kept makes every token's ratio smaller by this factor; a sequence's ratio by its product over all "
        "tokens.",
    ),
    (
        "Log ratio, d",
        "The trainer's log-prob of a sampled token minus the engine's, in nats. The importance sampling ratio is its "
        "exponential; over a sequence the log ratios add up.",
    ),
    (
        "Canary",
        "A few freshly sampled tokens, scored again by the trainer under its current weights, under older ones and "
        "without its adapters. Those that the engine's log-probs agree with are the weights it runs on.",
    ),
    (
        "Engine noise",
        "What is left of the log ratio once every known difference is taken off: rounding, number formats, kernels. "
        "It is compared with the noise floor.",
    ),
    (
        "Product over the sequence",
        "A sequence-level correction multiplies the ratios of all its tokens, so a small bias per token becomes a "
        "huge factor over a long completion.",
    ),
    (
        "Watched series, episode",
        "A log quantity followed step by step by four detectors: a spike, a level shift, a slow trend, a bias of the "
        "mean. What they find together is one episode, with one alarm.",
    ),
    (
        "Normaliser",
        "The number that the summed loss is divided by, for instance the count of trained tokens. Claimed is what "
        "a path's code "
        "uses, measured is what its coefficients imply.",
    ),
    (
        "Residual",
        "The part of the live gradient that no weighting of the sampled tokens can produce, relative to its size.",
    ),
    (
        "Micro-batch and step",
        "An optimizer step gathers the gradients of several micro-batches (gradient accumulation) before the "
        "weights move.",
    ),
)
