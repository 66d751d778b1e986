from __future__ import annotations

import pytest

from driftscope.dashboards.mismatch_tables import FIGURES, canary_table, figure_table, limit_table
from driftscope.dashboards.mismatch_view import drift_section
from driftscope.dashboards.report import render_html
from driftscope.journal import Run
from driftscope.mismatch.formulas import FORMULAS
from driftscope.mismatch.model import Mismatch
from driftscope.records import CanaryRecord, StepRecord, ViolationRecord
from tests.dashboards.simulated import NO_VERDICT, simulated_run


def record(step=1, **fields):
    return StepRecord(step=step, micro_step=0, live="reference", **fields)


@pytest.fixture(scope="module")
def steps():
    return simulated_run().steps


def page(steps):
    return render_html(Run(info=None, steps=steps, alerts=[], notes=[], problems=[]), NO_VERDICT)


def test_every_figure_of_the_table_has_a_formula_and_can_be_read():
    for figure in FIGURES:
        assert figure in FORMULAS
        Mismatch().get(figure)


def test_the_table_has_the_fields_names(steps):
    table = figure_table(steps)
    rows = {row[0]: row for row in table.rows}
    assert rows["divergence.k1"][3:5] == ["nat", "verl: rollout_corr/kl; miles: train/mis_kl"]
    assert "TRL: sampling/importance_sampling_ratio/mean" in rows["applied.product.mean"][4]
    assert rows["raw.token.ess"][1].endswith("%")
    assert not any(name.startswith("applied.token") for name in rows)  # the loss applies a sequence ratio
    assert "unscored" not in rows
    assert rows["probability.correlation"][1] == "0.9900"
    assert "160 micro-batches" in table.caption


def test_tokens_that_were_left_out_are_counted():
    rows = {row[0]: row for row in figure_table([record(mismatch=Mismatch(tokens=3, unscored=2))]).rows}
    assert rows["unscored"][2] == "2"
    assert rows["divergence.k1"][1] == "–"


def test_the_canary_table_shows_changes_and_the_end(steps):
    table = canary_table(steps)
    shown = [row[0] for row in table.rows]
    assert len(shown) == 8
    assert shown[:3] == ["1", "20", "21"]
    assert shown[-1] == "40"
    assert table.rows[2][1] == "older weights (step 20)"
    assert "8 of 40 looks" in table.caption
    assert table.columns[2:4] == ["To current weights", "To older weights"]


def test_stale_modules_and_notes_are_remarks():
    look = CanaryRecord(agrees_with="part", stale_modules=["lm_head", "a.b"], note="older weights are not kept")
    (row,) = canary_table([record(canary=look)]).rows
    assert row[1] == "older weights of a part"
    assert row[-1] == "old: lm_head, a.b; older weights are not kept"


def test_an_engine_with_another_tokenizer_is_a_remark():
    (row,) = canary_table([record(canary=CanaryRecord(tokenizer=["end of sequence 2 against 3"]))]).rows
    assert row[-1] == "tokenizer: end of sequence 2 against 3"


def test_crossed_limits_are_counted_with_the_furthest_value():
    def crossed(value):
        return ViolationRecord(
            limit="kl_high", figure="divergence.k1", value=value, allowed=0.1, nominal=0.1, source="verl"
        )

    steps = [record(i, violations=[crossed(v)], mismatch=Mismatch()) for i, v in ((1, 0.2), (3, 0.5), (4, 0.3))]
    table = limit_table([*steps, record(5, mismatch=Mismatch())])
    assert table.rows == [["kl_high", "divergence.k1", "0.5000", "0.1000", "0.1000", "3", "steps 1 to 4", "verl"]]
    assert "in 4 micro-batches" in table.caption
    assert drift_section(steps).limits == limit_table(steps)
    assert limit_table([record()]) is None


def test_the_section_says_what_the_canary_saw(steps):
    first, second = drift_section(steps).sentences
    assert first.startswith("The sampling engine agrees with the weights of step 20, in 20 of 40 looks")
    assert "first at step 21" in first
    assert second.startswith("At the last look: IS ratio 0.00")
    assert "truncated sampling" in second


def test_a_run_that_knows_nothing_of_drift_has_no_section():
    assert drift_section([]) is None
    assert drift_section([record()]) is None
    html = page([record()])
    assert "sampling-drift" not in html.split("</style>")[1]


def test_only_what_has_data_is_shown():
    section = drift_section([record(mismatch=Mismatch(tokens=1))])
    assert section.panels == []
    assert section.numbers is not None
    assert section.looks is None
    section = drift_section([record(canary=CanaryRecord(distances={"current": 0.1}))])
    assert [p.id for p in section.panels] == ["canary"]
    assert "unavailable" in section.sentences[0] or section.sentences[0].endswith("of the canary.")


def test_a_signal_that_could_not_be_had_is_unavailable_once():
    section = drift_section([record(unavailable={"mismatch": "no log-probs", "canary": "out of memory"})])
    assert [(p.id, p.unavailable) for p in section.panels] == [
        ("canary", "Unavailable: out of memory"),
        ("mismatch-distribution", "Unavailable: no log-probs"),
    ]
    text = page([record(unavailable={"canary": "out of memory"})])
    assert 'id="sampling-drift"' in text


def test_the_page_holds_the_section_and_its_link(steps):
    html = page(steps)
    for words in ('href="#sampling-drift"', 'id="plot-drift"', 'id="plot-mismatch-causes"', "rollout_corr/kl"):
        assert words in html
    assert html == page(steps)
