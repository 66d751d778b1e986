"""NaN and infinity at every input of the loss: the run goes on as it would alone, and the record names what it met."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from driftscope.hooks.scope import attach
from tests.hooks.runs import HAS_LIGER_LOSS, alerts_of, steps_of, trainer

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
OPTIONS: dict[str, Any] = {"max_steps": 2, "beta": 0.04, "top_p": 0.9, "model_config": {"attention_dropout": 0.1}}
BATCH = (
    "advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps",
    "importance_sampling_ratio", "num_items_in_batch",
)  # fmt: skip
INPUTS = (*BATCH, "rewards", "hidden states", "one hidden state", "weights")

LOG_PROBS = [name for name in INPUTS if name.endswith("logps")]
CASES = [(n, v) for n in INPUTS for v in ("nan", "inf")] + [(n, "-inf") for n in LOG_PROBS]


def poison(made: Any, name: str, value: float) -> None:
    """Put a value into one input of the loss, from the second step on."""
    if name in BATCH:
        original = made._generate_and_score_completions

        def poisoned(inputs: Any) -> Any:
            out = original(inputs)
            if made.state.global_step >= 1 or made.state.max_steps == 1:
                assert name in out, f"{name} is no part of this TRL's batch: {sorted(out)}"
                old = out[name]
                out[name] = torch.full_like(torch.as_tensor(old, dtype=torch.float32), value)
            return out

        made._generate_and_score_completions = poisoned
    elif name in ("hidden states", "one hidden state"):

        def spoil(_: Any, __: Any, output: Any) -> Any:
            if made.state.global_step >= 1 and torch.is_grad_enabled():
                hidden = output.last_hidden_state.clone()
                if name == "hidden states":
                    hidden = hidden + value
                else:
                    hidden[0, -3, 0] += value
                output.last_hidden_state = hidden
            return output

        made.model.get_decoder().register_forward_hook(spoil)
    elif name == "weights":
        step_of = made.training_step

        def before(model: Any, *args: Any, **kwargs: Any) -> Any:
            if made.state.global_step >= 1:
                with torch.no_grad():
                    next(p for n, p in model.named_parameters() if "norm" in n)[0] = value
            return step_of(model, *args, **kwargs)

        made.training_step = before


def run(directory: Any, name: str, value: float, *, watched: bool, liger: bool) -> tuple[Any, dict[str, Any], int]:
    """What ended the training, the weights after it, and the steps it came to."""

    def reward(completions: Any, **_: Any) -> list[float]:
        return [value if name == "rewards" else float(len(c)) for c in completions]

    with trainer(directory, liger=liger, reward=reward, **OPTIONS) as made:
        poison(made, name, value)
        scope = attach(made, directory / "run", spectrum_every=1, deep_every=1, console=False) if watched else None
        ended: Any = None
        try:
            made.train()
        except Exception as error:  # noqa: BLE001 - the run's own end, compared with the other run's
            ended = (type(error), str(error)[:80])
        if scope is not None:
            scope.detach()
        return ended, {n: v.clone() for n, v in made.model.state_dict().items()}, made.state.global_step


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "value"), CASES)
def test_an_input_that_is_not_finite(tmp_path: Any, name: str, value: str) -> None:
    liger = HAS_LIGER_LOSS and name in ("advantages", "hidden states")
    ended, plain, steps = run(tmp_path / "plain", name, VALUES[value], watched=False, liger=liger)
    ended_too, watched, steps_too = run(tmp_path / "watched", name, VALUES[value], watched=True, liger=liger)
    assert (ended_too, steps_too) == (ended, steps)
    for key, tensor in plain.items():
        assert torch.equal(tensor.nan_to_num(7.0, 8.0, 9.0), watched[key].nan_to_num(7.0, 8.0, 9.0)), key
    lines = (tmp_path / "watched" / "run" / "records.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} in the file"))
    report = tmp_path / "watched" / "run" / "report.html"
    assert report.exists() or ended is not None
    records = [r for r in steps_of(tmp_path / "watched" / "run") if r.step >= (1 if name == "rewards" else 2)]
    if ended is None and name == "rewards" and all(r.zero_advantage_share == 1.0 for r in records):
        assert records  # TRL has made zeros of them: nothing that is not finite comes to the loss
    elif ended is None:
        assert records
        assert all(r.nonfinite for r in records), [(r.step, r.micro_step, r.unavailable) for r in records]
        assert "DS401" in {a.rule for a in alerts_of(tmp_path / "watched" / "run")}
        if name in BATCH:
            assert all(f"inputs.{name}" in r.nonfinite for r in records)
