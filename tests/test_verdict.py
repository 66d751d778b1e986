from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftscope.journal import Run
from driftscope.records import CanaryRecord, Cause
from driftscope.rules import evaluate
from driftscope.verdict import judge
from tests.record_factory import alert, honest_ratio, info, note, seed_step, stats, step, truncated_ratio

TRAINER = {"top_p": 0.8, "top_k": 0, "min_p": None}


def run(*steps, trainer=None, alerts=(), notes=(), problems=(), **fields):
    return Run(info(trainer=trainer or {}, **fields), list(steps), list(alerts), list(notes), list(problems))


def rules(verdict):
    return {f.rule: f.severity for f in verdict.findings}


def test_the_broken_run_judges_both_paths_and_orders_the_advice():
    verdict = judge(run(*(seed_step(n) for n in range(1, 6)), trainer=TRAINER))
    assert verdict.level == "critical"
    assert verdict.headline == (
        "The fused Liger path trains on gradients about 118x larger than the configured loss because it drops the "
        "importance sampling correction (94% of the gap), and that correction is itself biased by truncated sampling "
        "(top_p=0.8)."
    )
    text = " ".join(verdict.summary)
    assert "top_p=0.8 keeps 81% of the probability mass per token" in text
    assert "over about 24 tokens the ratio of a sequence is about 0.00630" in text
    assert "hardly learns" in text
    assert "divides the loss by another number than configured (6.0% of the gap, factor 1.34)" in text
    action = verdict.first_action
    assert action.startswith("First set top_p=1.0 (or")
    assert "top_k" not in action
    assert action.index("top_p=1.0") < action.index("TRL >= 1.13")
    assert "Merely switching the fused path off" in action
    assert [f.rule for f in verdict.findings[:3]] == ["DS201", "DS101", "DS102"]


def test_no_advice_merely_switches_liger_off_while_the_ratio_is_biased():
    causes = [
        ("is_correction", 0.5, 30.0),
        ("normalizer", 0.3, 3.0),
        ("tool_mask", 0.1, 1.3),
        ("delta_clamp", 0.1, 1.2),
    ]
    broken = [seed_step(n, causes=causes) for n in (1, 2)]
    refused = [{"option": "delta", "where": "GRPOConfig", "message": "no"}]
    verdict = judge(run(*broken, trainer=TRAINER, refused=refused))
    for text in [verdict.first_action, *(f.remedy for f in verdict.findings)]:
        if "use_liger_kernel=False" in text:
            assert text.startswith("First ")
            assert "top_p=1.0" in text.partition("use_liger_kernel=False")[0]


def test_a_dropped_correction_with_an_honest_ratio_is_only_the_path():
    steps = [step(ratio=3.0, step=n, causes=[("is_correction", 1.0, 3.0)], is_ratio=honest_ratio()) for n in (1, 2)]
    verdict = judge(run(*steps))
    assert verdict.level == "warning"
    assert "about 3.00x larger" in verdict.headline
    assert "biased" not in verdict.headline
    assert "use_liger_kernel=False" in verdict.first_action


def test_a_smaller_gradient_is_called_smaller():
    verdict = judge(run(step(ratio=0.25, causes=[("normalizer", 1.0, 0.25)])))
    assert "about 4.00x smaller than the configured loss because it divides" in verdict.headline


def test_a_difference_without_a_gap_is_named():
    verdict = judge(run(step(ratio=1.0, cosine=0.9, causes=[("kl_bias_correction", 1.0, 1.0)])))
    assert verdict.level == "warning"
    assert verdict.headline == (
        "The fused Liger path trains on another loss than the configured one: it drops the bias correction of the KL "
        "term (100% of the gap)."
    )


def test_a_gap_on_few_steps_is_not_hidden_by_the_median():
    steps = [step(step=n) for n in range(1, 6)]
    verdict = judge(run(*steps, step(step=6, ratio=50.0, causes=[("tool_mask", 1.0, 50.0)])))
    assert verdict.level == "critical"
    assert "50.0x larger" in verdict.headline
    assert next(f for f in verdict.findings if f.rule == "DS101").count == 1
    assert next(f for f in verdict.findings if f.rule == "DS101").first_step == 6


def test_an_honest_run_is_clean():
    verdict = judge(run(*(step(step=n, is_ratio=honest_ratio()) for n in (1, 2))))
    assert verdict.level == "clean"
    assert verdict.findings == []
    assert verdict.first_action is None
    assert "trains on the configured loss" in verdict.headline
    assert any("agrees with float64" in line for line in verdict.summary)


def test_a_live_reference_beside_a_bad_shadow_is_information():
    causes = [("normalizer", 1.0, 0.5)]
    steps = [step(step=n, ratio=0.5, live="reference", causes=causes, is_ratio=honest_ratio()) for n in (1, 2)]
    verdict = judge(run(*steps))
    assert verdict.level == "info"
    assert verdict.headline.startswith("TRL's own path trains on the configured loss")
    assert "switching use_liger_kernel on would make the gradient about 2.00x smaller" in verdict.headline
    assert verdict.first_action is None


def test_a_live_reference_with_a_biased_ratio_is_critical():
    verdict = judge(run(seed_step(live="reference"), trainer=TRAINER))
    assert verdict.level == "critical"
    assert verdict.headline.startswith("TRL's own path trains on the configured loss")
    assert "the importance sampling ratio is biased: sampling with top_p=0.8 keeps 81%" in verdict.headline
    assert "use_liger_kernel" not in verdict.first_action
    assert rules(verdict)["DS102"] == "info"


def test_a_token_mode_is_told_to_open_the_support_only():
    ratio = truncated_ratio(0.81, 0.81, "token_truncate")
    verdict = judge(run(step(live="reference", is_ratio=ratio), trainer=TRAINER))
    assert "the ratio of a token is about 0.810" in verdict.headline
    assert "token_truncate" not in verdict.first_action


def test_a_faulty_reference_is_no_yardstick():
    record = step(live="reference")
    record.paths["reference"].coef_error = 0.12
    verdict = judge(run(record))
    assert verdict.level == "warning"
    assert verdict.headline == (
        "TRL's own path is not the configured loss: its token coefficients are off by 12%, and it is what trains."
    )
    assert any("no yardstick" in line for line in verdict.summary)


def test_a_gap_against_a_faulty_reference_says_both():
    record = step(ratio=5.0, causes=[("normalizer", 1.0, 5.0)])
    record.paths["reference"].coef_error = 0.12
    assert "than TRL's own path, which itself differs from the configured loss" in judge(run(record)).headline


def test_an_unexplained_gap_is_called_unexplained():
    verdict = judge(run(step(ratio=4.0, left=1.0)))
    assert verdict.level == "warning"
    assert verdict.headline.endswith("and no known term explains 100% of it.")
    assert "because" not in verdict.headline


def test_a_residual_of_a_live_reference_is_said():
    verdict = judge(run(step(live="reference", residual=0.3)))
    assert verdict.headline == (
        "TRL's own path trains on another loss than the configured one, and no known term explains the difference."
    )


def test_a_collapsed_ratio_without_truncation_is_said():
    ratio = honest_ratio()
    ratio.raw = ratio.applied = stats(0.05)
    verdict = judge(run(step(is_ratio=ratio)))
    assert verdict.level == "critical"
    assert "far from 1 (median 0.0500)" in verdict.headline
    assert "synchronised" in verdict.first_action


def test_non_finite_values_come_first():
    verdict = judge(run(seed_step(1), seed_step(2, nonfinite=["live_grad_norm"])))
    assert "NaN or infinite" in verdict.headline
    assert verdict.findings[0].rule == "DS401"
    assert "checkpoint" in verdict.first_action


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [step(tier="light")],
        [step(tier="light", gap=None, paths={}, residual=None, unexplained=None)],
        [step(gap=None, paths={}, residual=None, unexplained=None, unavailable={"spectrum": "failed"})],
    ],
)
def test_nothing_measured_is_unavailable_and_never_clean(steps):
    verdict = judge(run(*steps, notes=[note()], problems=["P"]))
    assert verdict.level == "unavailable"
    assert "Nothing was measured" in verdict.headline
    assert "attach" in verdict.summary[0].lower()
    assert verdict.summary[-1] == "While reading: P"


def test_what_was_unavailable_is_listed():
    verdict = judge(run(step(is_ratio=honest_ratio(), unavailable={"param_norm": "OutOfMemoryError: \x1b[31m"})))
    line = next(x for x in verdict.summary if x.startswith("Unavailable"))
    assert "param_norm (OutOfMemoryError:" in line
    assert "\x1b" not in line


def test_a_failed_probe_keeps_a_run_from_being_clean():
    verdict = judge(run(step(is_ratio=honest_ratio()), notes=[note()]))
    assert verdict.level == "warning"
    assert rules(verdict) == {"DS901": "warning"}


def test_refused_options_are_listed_and_leave_a_run_clean():
    verdict = judge(run(step(is_ratio=honest_ratio()), refused=[{"option": "delta", "where": "x", "message": "y"}]))
    assert verdict.level == "clean"
    assert rules(verdict) == {"DS111": "info"}


def test_alerts_on_record_are_counted_once():
    steps = [seed_step(n, micro_step=m) for n in (1, 2) for m in (0, 1)]
    with_alerts = judge(run(*steps, alerts=[a for s in steps for a in evaluate(s)]))
    without = judge(run(*steps))
    assert {f.rule: f.count for f in with_alerts.findings} == {f.rule: f.count for f in without.findings}
    assert {f.count for f in without.findings} == {2}


def test_alerts_of_unknown_rules_count():
    verdict = judge(run(step(is_ratio=honest_ratio()), alerts=[alert("XX900", "critical", 4)]))
    assert verdict.level == "critical"
    assert verdict.findings[0].rule == "XX900"
    assert verdict.headline.endswith("but: T.")


def test_the_runs_own_thresholds_are_used():
    steps = [step(ratio=2.0, causes=[("normalizer", 0.001, 1.0)])]
    assert "DS101" in rules(judge(run(*steps)))
    assert "DS101" not in rules(judge(run(*steps, settings={"gap_warning": 3.0, "gap_critical": 30.0})))


def test_without_run_json_the_verdict_stands():
    verdict = judge(Run(None, [seed_step()], [], []))
    assert verdict.level == "critical"
    assert "truncated sampling." in verdict.headline
    assert "top_p=1.0, top_k=0, min_p=None" in verdict.first_action


def test_the_verdict_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        judge(run()).level = "clean"


MAYBE = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(MAYBE, min_size=16, max_size=16),
    live=st.sampled_from(["liger", "reference", "corrected", "?"]),
    sides=st.sampled_from([("liger", "reference"), ("reference", "oracle"), ("?", "!")]),
    cause=st.sampled_from(["is_correction", "normalizer", "logit_transform", "unheard_of"]),
    seen=st.sampled_from(["stale_weights", "stale_module", "adapter_missing", "temperature", "unheard_of"]),
)
def test_no_record_breaks_the_verdict(values, live, sides, cause, seen):
    record = step(live=live, candidate=sides[0], reference=sides[1])
    gap, path, ratio = record.gap, record.paths[sides[0]], truncated_ratio()
    gap.grad_norm_ratio, gap.cosine, gap.noise_floor, gap.param_grad_norm_ratio = values[:4]
    path.hidden_grad_norm, path.coef_error, record.residual, ratio.kept_mass = values[4:8]
    ratio.truncated_support_share, ratio.applied.mean = values[8:10]
    record.is_ratio = ratio
    record.causes = step(causes=[(cause, 1.0, values[10])]).causes
    look = {"noise_floor": values[11], "bf16_noise": values[12], "rms": values[13], "rest_rms": values[14]}
    record.canary = CanaryRecord(agrees_with="part", **look)
    ratio.causes = [Cause(id=seen, share=0.5 if values[15] is None else values[15], factor=values[10])]
    verdict = judge(run(record, record))
    assert verdict.headline.endswith(".")
    assert "None" not in verdict.headline
    assert "nan" not in verdict.headline.replace("NaN", "").lower().split()
