"""What the verdict makes of the canary: an engine of another policy comes first."""

from __future__ import annotations

import pytest

from driftscope.records import CanaryRecord, Cause
from driftscope.verdict import judge
from tests.record_factory import alert, honest_ratio, seed_step, stats, step, truncated_ratio
from tests.test_verdict import TRAINER, rules, run


def looked(number, cause, agrees_with, *, share=0.9, modules=(), more=(), base=step, **fields):
    """A step whose canary named a cause; ``more``: (id, share) of further ones."""
    record = base(step=number, **{"is_ratio": honest_ratio(), **fields}) if base is step else base(number, **fields)
    named = [*([(cause, share)] if cause else []), *more]
    noise = 1 - sum(s for _, s in named)
    record.is_ratio.causes = [Cause(id=i, share=s, factor=0.9) for i, s in [*named, ("engine_noise", noise)]]
    record.canary = CanaryRecord(
        tokens=48, agrees_with=agrees_with, stale_modules=list(modules), snapshot_step=1, noise_floor=1e-6, rms=0.3,
        rest_rms=2e-6, distances={"current": 0.3},
    )  # fmt: skip
    return record


@pytest.mark.parametrize(
    ("cause", "agrees_with", "modules", "headline", "action"),
    [
        ("stale_weights", "previous", (), "The sampling engine runs on old weights (those of step 1) since step 2",
         "First bring the sampling engine back to the trainer's weights"),
        ("stale_module", "part", ("lm_head",), "A part of the sampling engine's weights (lm_head) is old since step 2",
         "First bring lm_head of the sampling engine back to the trainer's weights"),
        ("adapter_missing", "adapter_off", (), "The sampling engine runs without the adapter since step 2",
         "First give the sampling engine the adapter"),
        ("temperature", "current", (), "The sampling engine's log-probs are of another temperature",
         "First give engine and trainer the same temperature"),
    ],
)  # fmt: skip
def test_an_engine_of_another_policy_is_the_first_thing_to_change(cause, agrees_with, modules, headline, action):
    honest = looked(1, None, "current")
    verdict = judge(run(honest, *(looked(n, cause, agrees_with, modules=modules, live="reference") for n in (2, 3))))
    assert verdict.level == "critical"
    assert verdict.headline.startswith(headline)
    assert "is another policy than the one that trains" in verdict.headline
    assert verdict.first_action.startswith(action)
    assert "moot" in verdict.first_action
    assert verdict.findings[0].remedy in verdict.first_action


def test_the_engine_comes_before_the_sampling_settings_and_these_before_the_path():
    steps = [
        looked(n, "stale_weights", "previous", share=0.6, more=[("truncated_support", 0.4)], base=seed_step)
        for n in (2, 3)
    ]
    verdict = judge(run(*steps, trainer=TRAINER))
    assert verdict.headline.startswith(
        "The sampling engine runs on old weights (those of step 1) since step 2; besides, the fused Liger path trains "
        "on gradients about 118x larger"
    )
    assert "biased by truncated sampling (top_p=0.8)" in verdict.headline
    action = verdict.first_action
    places = [action.index(words) for words in ("bring the sampling engine", "Then set top_p=1.0", "TRL >= 1.13")]
    assert places == sorted(places)
    assert "Merely switching the fused path off" in action
    assert [f.rule for f in verdict.findings[:4]] == ["DS207", "DS201", "DS101", "DS102"]
    assert verdict.sampling == "IS ratio 0.00630: stale weights 60%, truncated sampling 40%, engine noise 0%"


def test_a_biased_ratio_is_told_after_the_engine():
    record = looked(2, "stale_weights", "previous", live="reference", is_ratio=truncated_ratio())
    verdict = judge(run(record, trainer=TRAINER))
    assert "; besides, the importance sampling ratio is biased: sampling with top_p=0.8 keeps 81%" in verdict.headline
    assert "Then set top_p=1.0" in verdict.first_action


def test_the_path_follows_an_engine_of_other_weights():
    record = looked(2, "stale_weights", "previous", ratio=3.0, causes=[("tool_mask", 1.0, 3.0)])
    verdict = judge(run(record))
    assert verdict.headline.endswith(
        "; besides, the fused Liger path trains on gradients about 3.00x larger than the configured loss because it "
        "trains on tool results (100% of the gap)."
    )
    assert " Then: " in verdict.first_action


def test_an_engine_explains_a_collapsed_ratio_better_than_the_collapse_itself():
    record = looked(2, "adapter_missing", "adapter_off", live="reference")
    record.is_ratio.raw = record.is_ratio.applied = stats(0.05)
    verdict = judge(run(record))
    assert rules(verdict)["DS202"] == "critical"
    assert "without the adapter" in verdict.headline
    assert "Check that the engine's weights are synchronised" not in verdict.first_action


def test_the_cause_that_most_looks_name_leads():
    steps = [looked(n, "stale_weights", "previous", live="reference") for n in (2, 3, 4)]
    steps.append(looked(5, "stale_module", "part", modules=["lm_head"], live="reference"))
    verdict = judge(run(*steps))
    assert verdict.headline.startswith("The sampling engine runs on old weights")
    assert set(rules(verdict)) >= {"DS207", "DS208"}


def test_another_temperature_beside_stale_weights_is_told_too():
    steps = [
        looked(n, "stale_weights", "previous", share=0.6, more=[("temperature", 0.4)], live="reference")
        for n in (2, 3)
    ]
    verdict = judge(run(*steps))
    assert verdict.first_action.startswith("First bring the sampling engine back")
    assert " Also: Give the engine and GRPOConfig the same temperature" in verdict.first_action


def test_an_honest_engine_is_said_and_changes_nothing():
    verdict = judge(run(*(looked(n, None, "current") for n in (1, 2))))
    assert verdict.level == "clean"
    assert verdict.first_action is None
    assert any("agrees with the current weights in all 2 looks of the canary" in line for line in verdict.summary)
    assert "What makes the log ratio at step 2: engine noise 100%." in verdict.summary
    assert verdict.sampling == "IS ratio 1.00: engine noise 100%"


def test_a_mismatch_within_the_noise_is_no_reason_to_act():
    record = looked(2, "stale_weights", "previous", live="reference")
    record.canary.rms = 2e-6
    verdict = judge(run(record))
    assert verdict.level == "clean"
    assert verdict.headline.startswith("TRL's own path trains on the configured loss")


def test_without_a_look_there_is_no_line_of_cause():
    verdict = judge(run(seed_step(1), trainer=TRAINER))
    assert verdict.sampling is None
    assert not any("canary" in line for line in verdict.summary)


def test_an_alert_of_the_engine_without_a_look_on_record_still_leads():
    verdict = judge(run(step(is_ratio=honest_ratio()), alerts=[alert("DS207", "critical", 2)]))
    assert verdict.headline.startswith("T, so that what it samples")
    assert verdict.first_action == (
        "First bring the sampling engine back to the trainer's weights: every ratio, and what follows from it, is "
        "moot until then. R"
    )


def test_noise_above_the_floor_is_measured_against_it():
    record = looked(2, None, "current")
    record.canary.rest_rms, record.canary.bf16_noise = 0.03, 0.025
    text = " ".join(judge(run(record)).summary)
    assert (
        "0.030 is unexplained: 30000 times the noise floor, within what bfloat16 makes in this model (0.025)" in text
    )
    record.canary.bf16_noise = 0.001
    assert "bfloat16" not in " ".join(judge(run(record)).summary)


def test_module_names_cannot_steer_a_terminal():
    names = ["a\x1b[31m", *"bcdef"]
    verdict = judge(run(looked(2, "stale_module", "part", modules=names, live="reference")))
    assert "\x1b" not in verdict.headline + verdict.first_action + " ".join(verdict.summary)
    assert "and 2 more" in verdict.headline
