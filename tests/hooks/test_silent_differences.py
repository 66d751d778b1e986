"""Each silent difference of TRL's Liger path, alone, in a real training run: found, named first, factor right.

The expected factors are closed forms over figures that these tests compute by themselves: masks and advantages of the
batch, and |dlogp/dh|^2 from a plain forward of the model.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from driftscope.hooks.environment import ToolEnvironmentTrainer
from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, even_lengths, steps_of, trainer

pytestmark = pytest.mark.skipif(not HAS_LIGER_LOSS, reason="this TRL has no Liger loss to differ from its own")


class Witness:
    """Sees the batches of a live run, and computes |u|^2 and log-probs of each by a plain forward."""

    def __init__(self, made: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        original = made.compute_loss

        def seen(model: Any, inputs: Any, **kwargs: Any) -> Any:
            self.batches.append(self._look(made, inputs))
            return original(model, inputs, **kwargs)

        made.compute_loss = seen

    @torch.no_grad()
    def _look(self, made: Any, inputs: Any) -> dict[str, Any]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        out = made.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        length = inputs["completion_ids"].size(1)
        logits = out.logits[:, -length - 1 : -1].double() / made.temperature
        weight = made.model.lm_head.weight.double()
        logp = logits.log_softmax(-1)
        u = weight[inputs["completion_ids"]] - logp.exp() @ weight
        chosen = logp.gather(-1, inputs["completion_ids"][..., None])[..., 0]
        return {**inputs, "uu": u.square().sum(-1), "logp": chosen}


def run(made: Any, run_dir: Any) -> list[Any]:
    scope = attach(made, run_dir, spectrum_every=1, deep_every=0, console=False, report=False)
    made.train()
    scope.detach()
    records = steps_of(run_dir)
    assert records
    assert all(not r.unavailable for r in records)
    return records


def check(record: Any, cause: str, factor: float) -> None:
    """The cause is named first, its factor is the closed form within 1%, and nothing is left unexplained."""
    assert record.causes, record
    assert record.causes[0].id == cause
    assert record.causes[0].factor == pytest.approx(factor, rel=0.01)
    assert record.gap.grad_norm_ratio == pytest.approx(math.prod(c.factor for c in record.causes), rel=0.01)
    assert record.unexplained.share < 0.01
    assert record.residual < 1e-5


def norm(c: torch.Tensor, uu: torch.Tensor) -> float:
    return float((c.double().square() * uu).sum().sqrt())


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_is_correction(tmp_path: Any, mode: str) -> None:
    with trainer(tmp_path, liger=True, top_p=0.8, vllm_importance_sampling_mode=mode, max_completion_length=8) as made:
        even_lengths(made)
        witness = Witness(made)
        records = run(made, tmp_path / "run")
    for record, batch in zip(records, witness.batches, strict=True):
        a = batch["advantages"][:, None].expand_as(batch["uu"])
        expected = norm(a, batch["uu"]) / norm(a * batch["importance_sampling_ratio"], batch["uu"])
        check(record, "is_correction", expected)
        assert [c.id for c in record.causes] == ["is_correction"]
        ideal = 1 / 0.8 if mode == "token_truncate" else 0.8**-8
        assert record.causes[0].factor == pytest.approx(ideal, rel=0.03)
        assert record.is_ratio.truncated_support_share == pytest.approx(1.0, abs=1e-3)
    rules = {a.rule for a in alerts_of(tmp_path / "run")}
    assert "DS102" in rules
    assert ("DS101" in rules) == (mode == "sequence_truncate")  # 1.25x is no gap to warn of, 6x is


def test_normalizer(tmp_path: Any) -> None:
    with trainer(tmp_path, liger=True, gradient_accumulation_steps=4, max_steps=3) as made:
        uneven(made)
        witness = Witness(made)
        records = run(made, tmp_path / "run")
    assert len({int(b["completion_mask"].sum()) for b in witness.batches}) > 1
    for record, batch in zip(records, witness.batches, strict=True):
        micro, window = float(batch["completion_mask"].sum()) * 4, float(batch["num_items_in_batch"])
        assert record.paths["liger"].normalizer_measured == pytest.approx(micro, rel=1e-3)
        assert record.paths["reference"].normalizer_measured == pytest.approx(window, rel=1e-3)
        if micro != window:
            check(record, "normalizer", window / micro)
    assert "DS103" in {a.rule for a in alerts_of(tmp_path / "run")}


def uneven(made: Any) -> None:
    """Cut completions to lengths that differ between micro-batches, before TRL pads them."""
    original = made._generate_single_turn
    lengths = torch.Generator().manual_seed(5)

    def shorter(*args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, logprobs, extra = original(*args, **kwargs)
        for i, ids in enumerate(completion_ids):
            keep = int(torch.randint(3, 13, (1,), generator=lengths))
            completion_ids[i], logprobs[i] = ids[:keep], logprobs[i][:keep]
        return prompt_ids, completion_ids, logprobs, extra

    made._generate_single_turn = shorter


def test_tool_mask(tmp_path: Any) -> None:
    # dr_grpo: its normaliser does not count tokens, so the mask alone differs
    with trainer(
        tmp_path,
        liger=True,
        trainer_class=ToolEnvironmentTrainer,
        tools=True,
        loss_type="dr_grpo",
        max_completion_length=24,
    ) as made:
        witness = Witness(made)
        records = run(made, tmp_path / "run")
    assert any(bool((b["tool_mask"] == 0).any()) for b in witness.batches)
    for record, batch in zip(records, witness.batches, strict=True):
        a = batch["advantages"][:, None] * batch["completion_mask"]
        check(record, "tool_mask", norm(a, batch["uu"]) / norm(a * batch["tool_mask"], batch["uu"]))
        assert [c.id for c in record.causes] == ["tool_mask"]
    assert "DS104" in {a.rule for a in alerts_of(tmp_path / "run")}


def test_kl_bias_correction(tmp_path: Any) -> None:
    with trainer(
        tmp_path,
        liger=True,
        beta=0.5,
        use_bias_correction_kl=True,
        loss_type="dr_grpo",
        learning_rate=2e-2,
        max_steps=3,
    ) as made:
        witness = Witness(made)
        records = run(made, tmp_path / "run")
    found = 0
    for record, batch in zip(records, witness.batches, strict=True):
        x = batch["ref_per_token_logps"].double() - batch["logp"]
        k3, slope = x.exp() - x - 1, 1 - x.exp()  # k3 and its derivative by logp
        ratio = (batch["logp"] - batch["old_per_token_logps"].double()).exp()
        mask, a = batch["completion_mask"], batch["advantages"][:, None]
        wanted = (-a * ratio + 0.5 * ratio * (slope + k3)) * mask
        dropped = (-a * ratio + 0.5 * slope) * mask
        expected = norm(dropped, batch["uu"]) / norm(wanted, batch["uu"])
        if record.step > 1:  # at the first step policy and reference are the same
            check(record, "kl_bias_correction", expected)
            found += 1
    assert found
    assert "DS105" in {a.rule for a in alerts_of(tmp_path / "run")}


def test_delta(tmp_path: Any) -> None:
    with trainer(
        tmp_path,
        liger=True,
        steps_per_generation=4,  # later steps of a generation train on ratios that have moved
        gradient_accumulation_steps=1,
        loss_type="dr_grpo",
        learning_rate=3e-3,
        max_steps=8,
    ) as made:
        made.args.delta = 1.25  # GRPOConfig refuses it together with Liger, so it is silent only when set afterwards
        witness = Witness(made)
        records = run(made, tmp_path / "run")
    found = 0
    for record, batch in zip(records, witness.batches, strict=True):
        a, mask = batch["advantages"][:, None], batch["completion_mask"]
        ratio = (batch["logp"] - batch["old_per_token_logps"].double()).exp()
        clipped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
        plain = torch.where(clipped, 0.0, -a * ratio) * mask
        clamped = torch.where((a < 0) & (ratio > 1.25), 0.0, plain)
        if norm(plain, batch["uu"]) > 1.001 * norm(clamped, batch["uu"]) > 0:
            check(record, "delta_clamp", norm(plain, batch["uu"]) / norm(clamped, batch["uu"]))
            found += 1
    assert found
    assert "DS106" in {a.rule for a in alerts_of(tmp_path / "run")}
