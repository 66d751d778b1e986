from __future__ import annotations

import itertools

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.hooks.sampling import SamplingParams, processed_log_probs, sample
from driftscope.hooks.tiny import tiny_model

LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 2


def nucleus(probs, mass):
    """The smallest set of the most likely tokens of at least this mass, by plain counting."""
    kept, total = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        if total >= mass:
            break
        kept.add(token)
        total += probs[token]
    return kept


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8, 0.99])
def test_top_p_keeps_the_nucleus_and_renormalises_over_it(top_p):
    probs = (LOGITS / 0.7).double().softmax(-1)
    logps = processed_log_probs(LOGITS, SamplingParams(temperature=0.7, top_p=top_p))
    for row, got in zip(probs.tolist(), logps.tolist(), strict=True):
        kept = nucleus(row, top_p)
        assert {t for t, value in enumerate(got) if value > -torch.inf} == kept
        mass = sum(row[t] for t in kept)
        assert mass >= top_p
        for token in kept:
            assert got[token] == pytest.approx(torch.tensor(row[token] / mass).log().item(), abs=1e-5)


def test_top_k_and_min_p_renormalise_over_what_they_keep():
    probs = LOGITS.softmax(-1)
    for params, kept in (
        (SamplingParams(top_k=5), probs >= probs.topk(5).values[:, -1:]),
        (SamplingParams(min_p=0.2), probs >= 0.2 * probs.amax(-1, keepdim=True)),
    ):
        expected = torch.where(kept, probs / (probs * kept).sum(-1, keepdim=True), 0)
        torch.testing.assert_close(processed_log_probs(LOGITS, params).exp(), expected)


@pytest.mark.parametrize("top_k", [-1, 0, 50])
def test_without_truncation_it_is_the_plain_log_softmax(top_k):
    params = SamplingParams(temperature=1.3, top_k=top_k)
    torch.testing.assert_close(processed_log_probs(LOGITS, params), (LOGITS / 1.3).log_softmax(-1))


def test_the_repetition_penalty_lowers_seen_tokens_only():
    seen = torch.zeros_like(LOGITS, dtype=torch.bool)
    seen[:, :10] = True
    expected = LOGITS.clone()
    expected[:, :10] = torch.where(LOGITS[:, :10] > 0, LOGITS[:, :10] / 1.5, LOGITS[:, :10] * 1.5)
    got = processed_log_probs(LOGITS, SamplingParams(repetition_penalty=1.5), seen)
    torch.testing.assert_close(got, expected.log_softmax(-1))


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "cohere"])
def test_cached_batched_decoding_agrees_with_a_forward_of_each_sequence_alone(arch):
    model = tiny_model(arch).eval()
    params = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=10, repetition_penalty=1.2)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12]]
    out = sample(model, prompts, params, stop_ids=(), max_model_len=256, generator=torch.Generator().manual_seed(0))
    for prompt, got in zip(prompts, out, strict=True):
        assert (len(got.token_ids), got.finish_reason) == (10, "length")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + got.token_ids])).logits[0, len(prompt) - 1 : -1]
        for step, token in enumerate(got.token_ids):
            seen = torch.zeros(1, 512, dtype=torch.bool)
            seen[0, prompt + got.token_ids[:step]] = True
            direct = processed_log_probs(logits[step][None], params, seen)[0]
            assert got.logps[step] == pytest.approx(direct[token].item(), abs=2e-5)
            assert got.ranks[step] == int((direct > direct[token]).sum()) + 1


def test_tokens_are_drawn_from_the_distribution_whose_log_probs_are_returned():
    model = tiny_model("qwen2", vocab=16).eval()
    params = SamplingParams(top_p=0.8, max_tokens=1)
    count = 4000
    out = sample(
        model, [[1, 2]] * count, params, stop_ids=(), max_model_len=8, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected = processed_log_probs(model(torch.tensor([[1, 2]])).logits[:, -1], params)[0].exp()
    observed = torch.bincount(torch.tensor([o.token_ids[0] for o in out]), minlength=16) / count
    assert not observed[expected == 0].any()
    assert (observed - expected).abs().max() < 4 * 0.5 / count**0.5


def test_a_stop_id_ends_its_own_row_only_and_is_part_of_it():
    model = tiny_model("qwen2", vocab=16).eval()
    params = SamplingParams(max_tokens=30)
    out = sample(
        model, [[1, 2]] * 8, params, stop_ids=(3,), max_model_len=256, generator=torch.Generator().manual_seed(2)
    )
    assert len({len(o.token_ids) for o in out}) > 1
    for completion in out:
        *before, last = completion.token_ids
        assert 3 not in before
        assert (completion.finish_reason == "stop") == (last == 3)
        assert len(completion.logps) == len(completion.ranks) == len(completion.token_ids)


def test_the_context_limit_cuts_each_row_at_its_own_length():
    out = sample(
        tiny_model().eval(),
        [[1, 2], [1, 2, 3, 4, 5]],
        SamplingParams(max_tokens=20),
        stop_ids=(),
        max_model_len=8,
        generator=torch.Generator().manual_seed(0),
    )
    assert [len(o.token_ids) for o in out] == [6, 3]


def test_the_same_generator_gives_the_same_tokens_and_the_global_state_stays():
    model = tiny_model().eval()
    before = torch.get_rng_state()
    runs = [
        sample(
            model,
            [[1, 2, 3]],
            SamplingParams(max_tokens=12),
            stop_ids=(),
            max_model_len=64,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (5, 5, 6)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -2},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
        {"logprobs": 3},
        {"structured_outputs": "regex"},
    ],
)
def test_a_request_it_cannot_serve_is_refused_by_name(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_truncation_steps_come_in_the_engines_order():
    # top_p is taken of what top_k left: with both, fewer tokens stay than with either.
    kept = {
        pair: int((processed_log_probs(LOGITS[:1], SamplingParams(top_k=pair[0], top_p=pair[1])) > -torch.inf).sum())
        for pair in itertools.product((0, 5), (1.0, 0.6))
    }
    top5 = LOGITS[0].topk(5).values.softmax(-1).tolist()
    assert kept[5, 1.0] == 5
    assert kept[5, 0.6] == len(nucleus(top5, 0.6)) < kept[0, 0.6]
