"""What a replay computes, against what is known of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from driftscope.algebra import coefficients
from driftscope.capsule import replay
from driftscope.capsule.headpass import head_pass, scene_of
from tests.capsule.sample import BROKEN, SPEC, sample

SAME = 1e-6  # relative rounding of sums in float32


def test_an_honest_capsule_is_the_same_and_clean():
    made = sample()
    again = replay(made)
    assert again.same and not again.findings
    assert len(again.figures) > 100
    assert again.record.gap.grad_norm_ratio == pytest.approx(1.0, rel=SAME)
    assert again.record.paths["liger"].coef_error < 1e-5
    assert again.record.paths["oracle"].loss == pytest.approx(made.measured["losses"]["reference"], rel=SAME)


def test_the_dropped_correction_is_measured_and_named():
    again = replay(sample(live_spec=BROKEN, mismatch=2.0))
    assert again.record.gap.grad_norm_ratio == pytest.approx(torch.e**2, rel=1e-3)
    assert [cause.id for cause in again.record.causes] == ["is_correction"]
    assert {a.rule for a in again.findings} >= {"DS101", "DS102"}


def test_the_live_coefficients_are_measured_from_the_hidden_gradient():
    """The live path's numbers come from h, g and W alone: doubling the saved gradient doubles them."""
    made = sample()
    doubled = replace(made, tensors={**made.tensors, "hidden_grad": 2 * made.tensors["hidden_grad"]})
    again = replay(doubled)
    assert again.record.gap.grad_norm_ratio == pytest.approx(2.0, rel=SAME)
    assert not again.same
    names = {f.name for f in again.figures if not f.same}
    assert {"paths.liger.hidden_grad_norm", "gap.grad_norm_ratio", "paths.liger.coef_error"} <= names
    assert "DS101 (warning)" in again.new


def test_another_finding_on_record_is_lost():
    broken, honest = sample(live_spec=BROKEN, mismatch=2.0), sample()
    again = replay(replace(honest, findings=broken.findings))
    assert "DS102 (critical)" in again.lost or "DS102 (warning)" in again.lost
    assert not again.same


@pytest.mark.parametrize("keep", [0, 1, 7])
def test_with_hidden_states_of_some_rows(keep):
    made = sample(live_spec=BROKEN, mismatch=1.0)
    some = made.tensors["hidden_rows"][: 3 * keep : 3] if keep else made.tensors["hidden_rows"][:0]
    tensors = {k: v for k, v in made.tensors.items() if not k.startswith("hidden")}
    if keep:
        tensors |= {
            "hidden_rows": some,
            "hidden": made.tensors["hidden"][some],
            "hidden_grad": made.tensors["hidden_grad"][some],
        }
    again = replay(replace(made, tensors=tensors))
    assert again.same
    assert (f"{keep} of 22 rows" in again.how["liger"]) is bool(keep)


def test_without_the_weight_the_products_stand():
    made = sample(live_spec=BROKEN, mismatch=1.0)
    again = replay(replace(made, tensors={k: v for k, v in made.tensors.items() if k != "head.weight"}))
    assert again.same
    assert "the head's weight is not in the capsule" in again.how["liger"]


def test_a_damaged_product_is_not_believed_where_hidden_states_are():
    made = sample()
    wrong = {**made.tensors, "view.model.uu": made.tensors["view.model.uu"] * 3}
    assert replay(replace(made, tensors=wrong)).same
    bare = {k: v for k, v in wrong.items() if not k.startswith("hidden")}
    assert not replay(replace(made, tensors=bare)).same


def test_the_entropy_term_is_measured_too():
    again = replay(sample(entropy=0.05))
    assert again.same
    assert again.record.paths["liger"].coef_error < 1e-5
    assert again.record.residual < 1e-5


def test_the_oracle_is_the_algebra_on_what_was_saved():
    made = sample()
    scene = scene_of(made, head_pass(made).spectrum)
    loss = coefficients(SPEC, scene.batches["model"]).loss
    assert replay(made).record.paths["oracle"].loss == pytest.approx(loss, rel=1e-12)


def test_a_reference_that_no_spec_gives_is_taken_as_saved():
    made = sample()
    strange = made.tensors["reference.c"] * torch.linspace(0.5, 2.0, 6)
    again = replay(replace(made, tensors={**made.tensors, "reference.c": strange}))
    assert again.how["reference"].startswith("coefficients as its own code gave them in the run: no known spec")
    assert again.record.paths["reference"].coef_error > 0.1


def test_a_stage_that_fails_is_unavailable_and_the_others_go_on(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken on purpose")

    made = sample()
    monkeypatch.setattr("driftscope.capsule.recompute.measure_mismatch", broken)
    again = replay(made)
    assert again.failed == {"mismatch": "RuntimeError: broken on purpose"}
    assert not again.same
    assert again.record.mismatch is None and again.record.is_ratio is not None and again.record.gap is not None
    assert all(f.same for f in again.figures if not f.name.startswith("mismatch"))
