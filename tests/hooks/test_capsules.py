"""Capsules of real runs: saved on the alarm, replayed to the same numbers where there is no trainer and no model."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import driftscope
from driftscope.capsule import read_capsule, replay
from driftscope.errors import UsageError
from driftscope.hooks.demo import build_trainer, quiet
from driftscope.hooks.sampler import stand_in_engine
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, notes_of, reset_accelerate, steps_of, trainer
from tests.hooks.test_head_transforms import adapted
from tests.record_factory import alert

ROUNDING = 1e-6  # of float32 sums over a batch, another order
NO_TRAINER = ("trl", "transformers", "accelerate", "peft", "datasets", "tokenizers")


def replay_elsewhere(path: Path, *, blocked: tuple[str, ...] = NO_TRAINER) -> dict[str, Any]:
    """The replay of a capsule in a process that can import neither a trainer nor a model."""
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from driftscope.cli import main\n"
        f"code = main(['replay', {str(path)!r}, '--json'])\n"
        f"assert not [m for m in {blocked!r} if sys.modules.get(m)]\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: Any) -> Path:
    """The demo's broken configuration: Liger trains where TRL has it, top_p=0.8, tools."""
    out = Path(tmp_path_factory.mktemp("demo"))
    reset_accelerate()
    with quiet(), stand_in_engine(seed=0):
        made = build_trainer(out / "scratch", steps=3, live="liger" if HAS_LIGER_LOSS else "reference")
        scope = driftscope.attach(made, out / "run", spectrum_every=1, deep_every=2, console=False)
        made.train()
        assert not scope.guard.off
        scope.detach()
    reset_accelerate()
    return out / "run"


@pytest.fixture(scope="module")
def elsewhere(demo: Path) -> dict[str, Any]:
    return replay_elsewhere(demo / "capsules" / "step-000001")


def test_the_first_critical_step_is_saved_once(demo: Path) -> None:
    critical = {a.rule for a in alerts_of(demo) if a.severity == "critical"}
    assert "DS201" in critical
    assert [p.name for p in (demo / "capsules").iterdir()] == ["step-000001"]  # the same findings go on
    saved = read_capsule(demo / "capsules" / "step-000001")
    assert saved.why == "alarm " + ", ".join(sorted(critical))
    assert saved.notes == []
    assert {"hidden", "hidden_grad", "head.weight"} <= saved.tensors.keys()
    assert notes_of(demo) == []


def test_it_is_the_record_of_the_run(demo: Path) -> None:
    saved = read_capsule(demo / "capsules" / "step-000001")
    (record,) = (s for s in steps_of(demo) if (s.step, s.micro_step) == (1, saved.record.micro_step))
    assert saved.record.paths == record.paths
    assert saved.record.mismatch == record.mismatch


def test_it_replays_to_the_same_numbers_without_a_trainer(elsewhere: dict[str, Any]) -> None:
    assert elsewhere["same"], elsewhere["figures"]["furthest"]
    assert elsewhere["failed"] == {} and elsewhere["lost"] == elsewhere["new"] == []
    assert elsewhere["figures"]["compared"] > 400
    assert max(f["difference"] for f in elsewhere["figures"]["furthest"]) < ROUNDING
    assert elsewhere["level"] == "critical" and elsewhere["exit_code"] == 1


def test_every_path_and_finding_is_computed_again(demo: Path, elsewhere: dict[str, Any]) -> None:
    live = "liger" if HAS_LIGER_LOSS else "reference"
    assert elsewhere["how"][live] == "measured again from hidden states and lm_head, every row"
    assert elsewhere["how"]["oracle"].startswith("the algebra in float64")
    assert elsewhere["how"]["corrected"].startswith("the fused head on the saved hidden states")
    own = elsewhere["how"]["liger code" if HAS_LIGER_LOSS else "liger"]
    assert own.startswith("Liger ") and "own code on the saved log-probs" in own
    saved = read_capsule(demo / "capsules" / "step-000001")
    rules = {f["rule"] for f in elsewhere["findings"]} - {"DS111"}
    assert rules == {a.rule for a in saved.findings}


def test_without_liger_the_algebra_stands_in(demo: Path) -> None:
    document = replay_elsewhere(demo / "capsules" / "step-000001", blocked=(*NO_TRAINER, "liger_kernel"))
    assert document["same"]
    own = document["how"]["liger code" if HAS_LIGER_LOSS else "liger"]
    assert "own code unavailable" in own


def test_no_machine_path_and_no_text_is_in_it(demo: Path) -> None:
    document = json.loads((demo / "capsules" / "step-000001" / "capsule.json").read_text())
    assert "run_dir" not in document["run"]["settings"]
    assert str(demo.parent) not in json.dumps(document)
    assert document["texts"] is None
    assert not any("prompt" in name for name in document["tensors"]["shapes"])


def test_on_demand(tmp_path: Path) -> None:
    with trainer(tmp_path, top_p=1.0) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1, console=False)
        with pytest.raises(UsageError, match="none was analysed"):
            scope.save_capsule()
        made.train()
        path = scope.save_capsule(texts=True)
        second = scope.save_capsule()
        elsewhere = scope.save_capsule(tmp_path / "mine")
        scope.detach()
    assert path == tmp_path / "run" / "capsules" / "step-000002"
    assert second.name == "step-000002-2" and elsewhere == tmp_path / "mine"
    saved = read_capsule(path)
    assert saved.why == "on demand" and "hidden" in saved.tensors
    assert saved.notes == ["lm_head is not saved: the optimizer has moved it since"]
    assert saved.texts is not None and len(saved.texts) == 4 and all(" " in text for text in saved.texts)
    assert read_capsule(second).texts is None
    assert replay(saved).same and replay(saved).findings == []


def test_after_its_window_the_large_tensors_are_gone(tmp_path: Path) -> None:
    with trainer(tmp_path, max_steps=3) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=2, console=False)
        made.add_callback(_At(scope, 2))
        made.train()
        scope.detach()
    saved = read_capsule(tmp_path / "at-2")
    assert saved.record.step == 1 and "hidden" not in saved.tensors
    assert "saved after its window: hidden states were let go" in saved.notes
    assert replay(saved).same


def _At(scope: Any, step: int) -> Any:
    """A callback that saves a capsule at the end of a step."""
    from transformers import TrainerCallback

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                scope.save_capsule(Path(scope.config.run_dir).parent / f"at-{step}")

    return Save()


def test_an_alarm_without_a_batch_waits_for_the_next(tmp_path: Path) -> None:
    with trainer(tmp_path, max_steps=3, top_p=1.0) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=2, console=False)
        write = scope.recorder.write

        def alarmed(window: Any, guard: Any) -> Any:
            extra = [alert(rule="ZZ101", number=2)] if window[-1].step == 2 else []
            return [*write(window, guard), *extra]

        scope.recorder.write = alarmed  # type: ignore[method-assign]
        made.train()
        scope.detach()
    (path,) = (tmp_path / "run" / "capsules").iterdir()
    assert path.name == "step-000003"
    saved = read_capsule(path)
    assert saved.why == "alarm ZZ101" and [a.rule for a in saved.alarm] == ["ZZ101"]
    assert [a.rule for a in replay(saved).carried] == ["ZZ101"]


def test_the_console_says_where_it_is(tmp_path: Path, capsys: Any) -> None:
    with trainer(tmp_path, top_p=0.5, max_steps=1) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1)
        made.train()
        scope.detach()
    told = "".join(capsys.readouterr().err.split())
    assert f"driftscopereplay{tmp_path}/run/capsules/step-000001" in told


def test_none_where_nothing_is_critical_or_it_is_off(tmp_path: Path) -> None:
    with trainer(tmp_path / "a", top_p=1.0) as made:
        scope = driftscope.attach(made, tmp_path / "honest", spectrum_every=1, console=False)
        made.train()
        scope.detach()
    assert not (tmp_path / "honest" / "capsules").exists()
    with trainer(tmp_path / "b", top_p=0.5) as made:
        scope = driftscope.attach(made, tmp_path / "off", spectrum_every=1, console=False, capsules=0)
        made.train()
        with pytest.raises(UsageError, match="capsules=0"):
            scope.save_capsule()
        scope.detach()
    assert any(a.severity == "critical" for a in alerts_of(tmp_path / "off"))
    assert not (tmp_path / "off" / "capsules").exists()


def test_a_full_disk_is_a_note_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with trainer(tmp_path, top_p=0.5, max_steps=3) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1, console=False)
        made.train()
        scope.detach()
        assert made.state.global_step == 3
    (note,) = notes_of(tmp_path / "run")
    assert note.stage == "capsule" and "No space left on device" in note.message
    assert list((tmp_path / "run" / "capsules").iterdir()) == []
    assert {s.step for s in steps_of(tmp_path / "run") if s.gap is not None} == {1, 2, 3}


@pytest.mark.parametrize(
    ("capsule_bytes", "held", "told"),
    [
        (300_000, "some", ""),
        (20_000, "some", "lm_head is not saved: it takes"),
        (0, "none", "hidden states on 0 of"),
    ],
)
def test_the_budget_holds(tmp_path: Path, capsule_bytes: int, held: str, told: str) -> None:
    with trainer(tmp_path, top_p=0.5, max_steps=1, max_completion_length=24) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1, console=False, capsule_bytes=capsule_bytes)
        made.train()
        scope.detach()
    (path,) = (tmp_path / "run" / "capsules").iterdir()
    saved = read_capsule(path)
    large = [v for k, v in saved.tensors.items() if k.startswith(("hidden", "head."))]
    assert sum(v.numel() * v.element_size() for v in large) <= capsule_bytes + 8 * len(saved.tensors["gg"])
    assert ("hidden" in saved.tensors) is (held == "some")
    assert any(note.startswith(told) for note in (*saved.notes, ""))
    again = replay(saved)
    assert again.same, [f for f in again.figures if not f.same]


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "gemma2", "model_config": {"final_logit_softcapping": 5.0}},
        {"arch": "cohere", "model_config": {"logit_scale": 0.25}},
        {"beta": 0.05},
        {"loss_type": "bnpo", "temperature": 0.7},
        {"bf16": True},
        {"dtype": torch.bfloat16},
    ],
    ids=["softcap", "scale", "beta", "bnpo", "autocast", "bfloat16"],
)
@pytest.mark.parametrize("liger", [False, True] if HAS_LIGER_LOSS else [False])
def test_other_models_and_losses(tmp_path: Path, options: dict[str, Any], liger: bool) -> None:
    with trainer(tmp_path, top_p=0.5, max_steps=1, liger=liger, **options) as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False)
        made.train()
        assert not scope.guard.off
        scope.detach()
    (path,) = (tmp_path / "run" / "capsules").iterdir()
    again = replay(read_capsule(path))
    assert again.same, ([f for f in again.figures if not f.same][:8], again.failed, again.lost, again.new)
    assert again.how[again.record.live].startswith("measured again from hidden states")


@pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL refuses an adapter on the head")
@pytest.mark.parametrize("liger", [False, True])
def test_with_an_adapter_on_the_head(tmp_path: Path, liger: bool) -> None:
    with trainer(tmp_path, max_steps=1, wrap=adapted, use_vllm=False, liger=liger, loss_type="grpo") as made:
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1, deep_every=1, console=False)
        made.train()
        path = scope.save_capsule()
        scope.detach()
    saved = read_capsule(path)
    assert set(saved.measured["heads"]) == {"model", "raw"} and "head.weight" in saved.tensors  # it is frozen
    again = replay(saved)
    assert again.same, ([f for f in again.figures if not f.same][:8], again.failed)
    how = again.how[again.record.live]
    assert "products as the run measured them: its logits are more than lm_head" in how
    assert "measured again from hidden states and lm_head, every row" in how
    assert "DS108" in {a.rule for a in again.findings}


@pytest.mark.parametrize("where", ["importance_sampling_ratio", "advantages"])
def test_a_batch_with_nan_replays_too(tmp_path: Path, where: str) -> None:
    with trainer(tmp_path, max_steps=1) as made:
        real = made._generate_and_score_completions

        def poisoned(inputs: Any) -> Any:
            out = real(inputs)
            out[where] = torch.full_like(out[where], math.nan)
            return out

        made._generate_and_score_completions = poisoned
        scope = driftscope.attach(made, tmp_path / "run", spectrum_every=1, console=False)
        made.train()
        path = scope.save_capsule()
        scope.detach()
    again = replay(read_capsule(path))
    assert again.same, ([f for f in again.figures if not f.same][:8], again.failed, again.lost, again.new)
    assert "DS401" in {a.rule for a in again.findings}


def test_holding_a_batch_changes_nothing(tmp_path: Path) -> None:
    def weights(name: str, capsules: int) -> dict[str, torch.Tensor]:
        with trainer(tmp_path / name, top_p=0.5, max_steps=3) as made:
            scope = driftscope.attach(
                made, tmp_path / f"run-{name}", spectrum_every=1, console=False, capsules=capsules
            )
            made.train()
            scope.detach()
            return {k: v.clone() for k, v in made.model.state_dict().items()}

    off, on = weights("off", 0), weights("on", 3)
    assert (tmp_path / "run-on" / "capsules").is_dir()
    assert all(torch.equal(off[name], on[name]) for name in off)
