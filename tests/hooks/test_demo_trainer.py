"""The demo's trainer shows the picture of a broken run, and an honest one where it should."""

from __future__ import annotations

import statistics

import pytest
import torch

from driftscope.errors import UsageError
from driftscope.hooks.demo import build_trainer, even_words, prompts, quiet
from driftscope.hooks.environment import ASK_WORDS, DONE_WORDS, MIN_POLICY, Episode, lookup
from driftscope.hooks.sampler import stand_in_engine
from tests.hooks.runs import HAS_LIGER_LOSS, reset_accelerate

RATIO = "sampling/importance_sampling_ratio/mean"
LOSS_BATCH = (
    "completion_mask",
    "completion_ids",
    "tool_mask",
    "sampling_per_token_logps",
    "prompt_mask",
    "advantages",
)


def run(tmp_path, *, live="reference", top_p=0.8, steps=4, seed=0):
    """Train the demo's trainer; returns its logs and the micro-batches that the loss saw."""
    reset_accelerate()
    batches = []
    with quiet(), stand_in_engine(seed=seed):
        trainer = build_trainer(tmp_path, steps=steps, seed=seed, live=live, top_p=top_p)
        compute_loss = trainer.compute_loss

        def seen(model, inputs, *args, **kwargs):
            batches.append({name: inputs[name].clone() for name in LOSS_BATCH if name in inputs})
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = seen
        trainer.train()
    reset_accelerate()
    return [log for log in trainer.state.log_history if "grad_norm" in log], batches


def mean(logs, name):
    return statistics.mean(log[name] for log in logs)


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss")
def test_the_broken_run_has_a_small_ratio_and_a_hundredfold_gradient(tmp_path):
    liger, _ = run(tmp_path / "liger", live="liger")
    reference, _ = run(tmp_path / "reference")
    assert 0.003 < mean(liger, RATIO) < 0.01
    assert 0.003 < mean(reference, RATIO) < 0.01
    assert 50 < mean(liger, "grad_norm") / mean(reference, "grad_norm") < 300
    # Both start from the same weights and the same samples.
    assert liger[0][RATIO] == pytest.approx(reference[0][RATIO], rel=1e-5)
    assert liger[0]["reward"] == reference[0]["reward"]


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss")
def test_with_full_support_the_hundredfold_gap_is_gone(tmp_path):
    liger, _ = run(tmp_path / "liger", live="liger", top_p=1.0, steps=2)
    reference, _ = run(tmp_path / "reference", top_p=1.0, steps=2)
    assert mean(liger, RATIO) == pytest.approx(1, abs=1e-3)
    assert liger[0]["grad_norm"] / reference[0]["grad_norm"] == pytest.approx(1, abs=0.25)


@pytest.mark.skipif(HAS_LIGER_LOSS, reason="this TRL has a Liger loss")
def test_a_liger_run_is_refused_where_trl_has_no_liger_loss(tmp_path):
    with pytest.raises(UsageError, match="no Liger loss"):
        build_trainer(tmp_path, live="liger")


def test_the_reference_run_shows_the_same_small_ratio_in_every_stack(tmp_path):
    logs, batches = run(tmp_path, steps=3)
    assert 0.003 < mean(logs, RATIO) < 0.01
    assert len(batches) == 3 * 4
    for batch in batches:
        tools = (batch["completion_mask"] * (1 - batch["tool_mask"])).bool()
        assert (batch["sampling_per_token_logps"][tools] == 0).all()
        policy = (batch["completion_mask"] * batch["tool_mask"]).bool()
        assert (batch["sampling_per_token_logps"][policy] < 0).all()
    together = torch.stack([(b["completion_mask"] * b["tool_mask"]).sum() for b in batches])
    assert len(together.unique()) > 1  # uneven micro-batches
    assert any((1 - b["tool_mask"]).any() for b in batches)
    assert any((b["prompt_mask"][:, 0] == 0).any() for b in batches)  # left padding
    assert any((b["completion_mask"][:, -1] == 0).any() for b in batches)  # uneven lengths
    assert any(b["advantages"].abs().max() > 0.1 for b in batches)


def test_the_honest_run_has_a_ratio_of_one(tmp_path):
    logs, _ = run(tmp_path, top_p=1.0, steps=2)
    assert mean(logs, RATIO) == pytest.approx(1, abs=1e-3)


def test_a_seed_repeats_its_run_and_another_does_not(tmp_path):
    first, again, other = (run(tmp_path / str(i), steps=1, seed=seed)[0] for i, seed in enumerate((0, 0, 1)))
    assert first[0]["grad_norm"] == again[0]["grad_norm"] != other[0]["grad_norm"]


def test_an_episode_ends_at_the_first_done_word_that_counts():
    done = DONE_WORDS.start
    episode = Episode()
    episode.say([done] * 3 + [200] * 3, [-1.0] * 6)
    episode.hear([done, 201])
    episode.say([300] * (MIN_POLICY - 6) + [done, 301], [-2.0] * (MIN_POLICY - 4))
    episode.finish(limit=100)
    assert sum(episode.policy) == MIN_POLICY + 1
    assert episode.token_ids[-1] == done
    assert len(episode.token_ids) == len(episode.logps) == len(episode.policy) == MIN_POLICY + 3
    assert episode.policy[6:8] == [0, 0]
    assert episode.logps[6:8] == [0.0, 0.0]


def test_an_episode_ends_at_the_limit():
    episode = Episode()
    episode.say([200] * 50, [-1.0] * 50)
    episode.finish(limit=28)
    assert len(episode.token_ids) == len(episode.logps) == len(episode.policy) == 28


def test_tool_results_differ_in_length_and_hold_plain_words():
    results = [lookup(word) for word in ASK_WORDS]
    assert {len(r) for r in results} == {3, 4, 5, 6, 7, 8}
    assert all(word < 505 and word not in ASK_WORDS for r in results for word in r)


def test_reward_and_prompts():
    assert even_words(["w2 w3 <user> w4", ""]) == [2 / 3, 0.0]
    assert len({len(p.split()) for p in prompts()}) > 3


@pytest.mark.parametrize("bad", [{"steps": 0}, {"live": "other"}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_a_value_outside_its_domain_is_refused_by_name(tmp_path, bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        build_trainer(tmp_path, **bad)


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss to correct")
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_demo_in_correct_mode_has_no_finding_on_its_loss(tmp_path, top_p):
    """With an honest sampler there is no finding at all; the truncated one is the sampler's, not the loss's."""
    from driftscope.hooks.demo import run_demo
    from driftscope.journal import read_run

    run_demo(tmp_path / "run", steps=3, live="liger", top_p=top_p, mode="correct")
    run = read_run(tmp_path / "run")
    assert {s.live for s in run.steps} == {"corrected"}
    assert all(s.paths["corrected"].coef_error < 1e-5 for s in run.steps)
    assert any(s.paths["liger"].coef_error > 0.01 for s in run.steps)  # the path it would have trained on
    assert {a.rule for a in run.alerts} == (set() if top_p == 1.0 else {"DS201"})
