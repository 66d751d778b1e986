"""Trouble of every kind: the run goes on, and the fact is on record."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from driftscope.errors import UnsupportedTrainerError, UsageError
from driftscope.hooks.callback import DriftscopeCallback
from driftscope.hooks.scope import attach
from tests.faults.stages import STAGES, break_it
from tests.hooks.runs import alerts_of, notes_of, steps_of, trainer


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_a_stage(tmp_path: Any, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls = break_it(monkeypatch, STAGES[stage])
    with trainer(tmp_path, max_steps=3, top_p=0.8) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=1)
        made.train()
        scope.detach()
        assert made.state.global_step == 3
    assert calls, "the broken function was never called: this test tests nothing"
    assert "broken on purpose" in " ".join(scope.guard.off.values()) or stage == "journal"
    told = capsys.readouterr().err
    assert "broken on purpose" in told
    if stage != "journal":
        notes = notes_of(tmp_path / "run")
        assert any("broken on purpose" in note.message for note in notes)
        assert len([n for n in notes if "broken on purpose" in n.message]) <= 2  # told once, not at every step


def test_the_other_stages_go_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, STAGES["liger"])
    with trainer(tmp_path) as made, attach(made, tmp_path / "run", spectrum_every=1, console=False):
        made.train()
    for record in steps_of(tmp_path / "run"):
        assert record.paths["reference"].coef_error < 1e-5
        assert "liger" in record.unavailable


def test_nan_in_the_ratio(tmp_path: Any) -> None:
    with trainer(tmp_path, max_steps=1) as made:
        original = made._generate_and_score_completions

        def poisoned(inputs: Any) -> Any:
            out = original(inputs)
            out["importance_sampling_ratio"] = torch.full_like(out["importance_sampling_ratio"], math.nan)
            return out

        made._generate_and_score_completions = poisoned
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False):
            made.train()
        assert made.state.global_step == 1
    records = steps_of(tmp_path / "run")
    assert len(records) == 2
    assert all(r.nonfinite for r in records)
    assert "DS401" in {a.rule for a in alerts_of(tmp_path / "run")}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_weights(tmp_path: Any, value: float) -> None:
    with trainer(tmp_path, use_vllm=False, max_steps=2) as made:
        step = made.training_step

        def poisoned(model: Any, *args: Any, **kwargs: Any) -> Any:
            out = step(model, *args, **kwargs)
            for p in model.parameters():
                p.grad[0] = value
            return out

        made.training_step = poisoned
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False):
            try:
                made.train()
            except RuntimeError as error:  # sampling from NaN weights is the run's own end
                assert "probability tensor" in str(error)  # noqa: PT017
    assert any("live_grad_norm" in r.nonfinite for r in steps_of(tmp_path / "run"))
    assert "DS401" in {a.rule for a in alerts_of(tmp_path / "run")}


def test_unwritable_run_directory(tmp_path: Any, capsys: Any) -> None:
    (tmp_path / "file").write_text("not a directory")
    with trainer(tmp_path) as made:
        with attach(made, tmp_path / "file" / "run", spectrum_every=1):
            made.train()
        assert made.state.global_step == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "cannot be written" in told
    assert "without records" in told


def test_not_a_grpo_trainer(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedTrainerError, match="not a GRPO trainer"):
        attach(object(), tmp_path / "run")


def test_callback_on_another_trainer(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from driftscope.hooks.tiny import tiny_model

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    made = Trainer(tiny_model(), args, train_dataset=rows, callbacks=[DriftscopeCallback(tmp_path / "run")])
    with pytest.warns(UserWarning, match="not a GRPO trainer"):
        made.train()
    assert made.state.global_step == 1


def test_a_trainer_whose_internals_were_renamed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(tmp_path) as made:
        monkeypatch.delattr(type(made), "_compute_loss")
        with pytest.raises(UnsupportedTrainerError, match="_compute_loss"):
            attach(made, tmp_path / "run")


def test_attached_twice(tmp_path: Any) -> None:
    with (
        trainer(tmp_path) as made,
        attach(made, tmp_path / "run", console=False),
        pytest.raises(UsageError, match="already"),
    ):
        attach(made, tmp_path / "run")


@pytest.mark.parametrize(
    "setting", [{"spectrum_every": -1}, {"gap_warning": 0.5}, {"on_divergence": "panic"}, {"workspace_bytes": 0}]
)
def test_bad_settings(tmp_path: Any, setting: dict[str, Any]) -> None:
    with trainer(tmp_path) as made, pytest.raises(UsageError, match=next(iter(setting))):
        attach(made, tmp_path / "run", **setting)


def test_stop_on_divergence(tmp_path: Any) -> None:
    with trainer(
        tmp_path, top_p=0.5, max_steps=5, max_completion_length=24, vllm_importance_sampling_mode="sequence_truncate"
    ) as made:
        with attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, on_divergence="stop", console=False):
            made.train()
        assert made.state.global_step == 1
    assert any(a.severity == "critical" for a in alerts_of(tmp_path / "run"))


def test_a_second_run_starts_with_empty_records(tmp_path: Any) -> None:
    for _ in range(2):
        with trainer(tmp_path, max_steps=1) as made, attach(made, tmp_path / "run", spectrum_every=1, console=False):
            made.train()
    assert [r.step for r in steps_of(tmp_path / "run")] == [1, 1]  # two micro-batches of one run
    assert len(list((tmp_path / "run").glob("records.*.jsonl"))) == 1


def test_a_resumed_run_goes_on_in_its_records(tmp_path: Any) -> None:
    from driftscope.journal import read_run

    saved = {"save_strategy": "steps", "save_steps": 1}
    with trainer(tmp_path, max_steps=1, **saved) as made, attach(made, tmp_path / "run", console=False):
        made.train()
    first = read_run(tmp_path / "run").info.run_id
    with (
        trainer(tmp_path, max_steps=2, **saved) as made,
        attach(made, tmp_path / "run", spectrum_every=1, console=False),
    ):
        made.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-1"))
    assert [r.step for r in steps_of(tmp_path / "run")] == [1, 1, 2, 2]
    assert read_run(tmp_path / "run").info.run_id == first
