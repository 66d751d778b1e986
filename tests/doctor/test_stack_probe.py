"""The stack probe against four pairs of TRL and Liger, installed for real.

What each pair does is established twice besides the probe: by reading the installed source, and by moving one term at
a time and looking whether the gradient moves (``stack_witness``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from driftscope.doctor.facts import Settings
from driftscope.hooks.doctor.features import Head, catalogue
from driftscope.hooks.doctor.stack import TOLERANCE
from driftscope.hooks.doctor.stack_rig import Rig
from driftscope.hooks.doctor.stack_state import untouched
from tests.doctor import stack_witness
from tests.hooks.runs import IS_SEED_STACK, reset_accelerate

ROOT = Path(__file__).resolve().parents[2]
FIVE = ("is_correction", "normalizer", "tool_mask", "kl_bias_correction", "delta")
HEADS = ("logit_softcap", "logit_scale", "head_adapter")
DROPPED, HONOURED, REFUSED = "dropped", "honoured", "refused"
# What Liger's path does, by TRL and Liger: read in their sources (test_the_source_says_so), moved in stack_witness.
LIGER = {
    ("0.27.2", "0.6.5"): {
        "is_correction": DROPPED,
        "normalizer": DROPPED,
        "tool_mask": DROPPED,
        "kl_bias_correction": DROPPED,
        "delta": REFUSED,
        "logit_softcap": DROPPED,
        "logit_scale": DROPPED,
        "head_adapter": DROPPED,
        "importance_sampling_level=sequence": REFUSED,
        "temperature": HONOURED,
    },
    ("0.29.1", "0.7.0"): {
        "is_correction": HONOURED,
        "normalizer": DROPPED,
        "tool_mask": HONOURED,
        "kl_bias_correction": DROPPED,
        "delta": REFUSED,
        "logit_softcap": DROPPED,
        "logit_scale": DROPPED,
        "head_adapter": DROPPED,
        "importance_sampling_level=sequence": REFUSED,
        "temperature": HONOURED,
    },
    ("1.13.0", "0.8.5"): {
        **dict.fromkeys(FIVE, HONOURED),
        "logit_softcap": DROPPED,
        "logit_scale": DROPPED,
        "head_adapter": REFUSED,
        "importance_sampling_level=sequence": HONOURED,
        "temperature": HONOURED,
    },
}
# TRL's own path: everything, but for a normaliser that knows no steps_per_generation before TRL 1.9, and for an
# adapter on the head under the fused LM head of TRL 1.16.
OWN = {
    "0.27.2": {"steps_per_generation": DROPPED, "head_adapter": HONOURED},
    "0.29.1": {"steps_per_generation": DROPPED, "head_adapter": HONOURED},
    "1.13.0": {"steps_per_generation": HONOURED, "head_adapter": HONOURED},
    "1.16.0": {"steps_per_generation": HONOURED, "head_adapter": REFUSED},
}
PAIRS = {
    "seed": {"trl-0.29.1-liger_kernel-0.7.0": ("0.29.1", "0.7.0")},
    "current": {"trl-1.13.0-liger_kernel-0.8.5": ("1.13.0", "0.8.5")},
}
HERE = "seed" if IS_SEED_STACK else "current"


@cache
def report(pair: str) -> dict[str, Any]:
    """The witness's report on a pair of ``.venv/pairs``, or on this environment's own (the empty name)."""
    if not pair:
        reset_accelerate()
        return stack_witness.report()
    folder = ROOT / ".venv" / "pairs" / pair
    if not (folder / "driftscope-setup.stamp").exists():
        pytest.skip(f"{pair} is not installed: make setup-pairs")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.doctor.stack_witness"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(found: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    return {row["feature"]: row for row in found["rows"] if row["path"] == path}


EVERY_PAIR = ["", *(pytest.param(name, marks=pytest.mark.slow) for name in PAIRS[HERE])]


def expected(found: dict[str, Any]) -> dict[str, str] | None:
    return LIGER.get((found["versions"]["trl"], found["versions"]["liger_kernel"]))


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_the_probe_is_right_about_ligers_path(pair: str) -> None:
    found = report(pair)
    if pair:
        versions = tuple(found["versions"][name] for name in ("trl", "liger_kernel"))
        assert versions == PAIRS[HERE][pair], "the pair did not come first"
    wanted, table = expected(found), rows(found, "liger")
    if wanted is None:  # TRL 1.14 and later
        assert list(table) == ["configuration"]
        assert table["configuration"]["status"] == "unavailable"
        assert "no Liger loss" in table["configuration"]["message"]
        return
    assert {name: table[name]["status"] for name in wanted} == wanted
    assert {name for name, row in table.items() if row["status"] == "refused" and not row["message"]} == set()
    assert all(row["error"] <= TOLERANCE for row in table.values() if row["status"] == "honoured")


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_the_gradient_moves_with_what_is_honoured_and_with_nothing_else(pair: str) -> None:
    found = report(pair)
    for path, moved in found["reactions"].items():
        table = rows(found, path)
        for feature, reaction in moved.items():
            status = table[feature]["status"]
            assert {True: HONOURED, False: DROPPED}.get(reaction, REFUSED) == status, (path, feature, reaction)
            if status == REFUSED:
                assert table[feature]["message"] == " ".join(reaction.split())


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_trls_own_path(pair: str) -> None:
    found = report(pair)
    table = rows(found, "reference")
    wanted = {**dict.fromkeys((*FIVE, "logit_softcap", "logit_scale"), HONOURED), **OWN[found["versions"]["trl"]]}
    assert {name: table[name]["status"] for name in wanted} == wanted
    if wanted["steps_per_generation"] == DROPPED:  # it divides by the tokens of 4 micro-batches, and steps after 2
        assert table["steps_per_generation"]["factor"] == pytest.approx(0.5, rel=1e-5)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"):
        assert table[f"loss_type={loss_type}"]["status"] == HONOURED


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_the_normalisers_factor_is_the_closed_form(pair: str) -> None:
    """34 tokens a micro-batch, two of them accumulated, 109 in the window: Liger divides by 68."""
    row = rows(report(pair), "liger").get("normalizer")
    if row is None or row["status"] == HONOURED:
        return
    assert row["factor"] == pytest.approx(round(1.6 * 34 * 2) / (34 * 2), rel=1e-5)


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_luspo_is_told_apart_from_its_older_formula(pair: str) -> None:
    found = report(pair)
    seen = {path: rows(found, path).get("loss_type=luspo", {}).get("status") for path in ("liger", "reference")}
    wanted = {
        "0.27.2": {"liger": None, "reference": None},  # TRL has no luspo
        "0.29.1": {"liger": REFUSED, "reference": "differs"},  # Liger 0.7.0 has none; (loss * length).mean()
        "1.13.0": {"liger": "differs", "reference": HONOURED},  # the older formula was left in trl.losses
        "1.16.0": {"liger": None, "reference": HONOURED},
    }
    assert seen == wanted[found["versions"]["trl"]]


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_it_takes_a_few_seconds(pair: str) -> None:
    assert report(pair)["seconds"] < 30  # 2 to 3 on an idle machine


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_the_source_says_so(pair: str) -> None:
    """A term is honoured if TRL hands it to the fused loss; what it does not hand over is dropped or refused."""
    found = report(pair)
    wanted = expected(found)
    if wanted is None:
        assert found["handed_to_liger"] == ""
        return
    handed = {
        "is_correction": "vllm_is_ratio=",
        "normalizer": "num_items_in_batch=",
        "tool_mask": '*inputs["tool_mask"]',
        "kl_bias_correction": "use_bias_correction_kl=",
        "delta": "delta=",
        "importance_sampling_level=sequence": "importance_sampling_level=",
        "temperature": "temperature=self.temperature",
        "logit_softcap": "softcap",
        "logit_scale": "logit_scale",
    }
    for feature, text in handed.items():
        assert (text in found["handed_to_liger"]) == (wanted[feature] == HONOURED), feature
    assert "lm_head.weight" in found["handed_to_liger"]


@pytest.mark.skipif(not IS_SEED_STACK, reason="the ratio is dropped in the seed's stack alone")
def test_the_ratios_factor_is_the_closed_form(tmp_path: Path) -> None:
    """|A r| / |A r w| over the tokens that are not clipped, with |dlogp/dh| from a plain forward of the model."""
    with untouched():
        rig = Rig(tmp_path)
        feature = catalogue(Settings(), Head(), tools=False, processes=1)[0]
        step = rig.step(feature, "liger")
        model = rig._made("plain")
    inputs = step.inputs
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -13:-1].double()
        weight = model.lm_head.weight.double()
        logp = logits.log_softmax(-1)
        uu = (weight[inputs["completion_ids"]] - logp.exp() @ weight).square().sum(-1)
        r = (logp.gather(-1, inputs["completion_ids"][..., None])[..., 0] - inputs["old_per_token_logps"]).exp()
        a = inputs["advantages"][:, None]
        clipped = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
        c = torch.where(clipped, 0.0, a * r) * inputs["completion_mask"]
        wanted = (c.square() * uu).sum().sqrt() / (
            (c * inputs["importance_sampling_ratio"]).square() * uu
        ).sum().sqrt()
    row = rows(report(""), "liger")["is_correction"]
    assert row["factor"] == pytest.approx(float(wanted), rel=1e-4)
    assert row["factor"] > 3


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_what_the_rules_foresee(pair: str) -> None:
    """Each rule's real configuration in which it fires, and the pairs in which it must not."""
    found = report(pair)
    wanted = {
        "0.27.2": {
            "seed": {"DS102", "DS103", "DS111"},
            "kl": {"DS105", "DS111"},
            "luspo": {"DS111"},  # unknown to TRL: refused, and so critical
            "own luspo": {"DS111"},
            "plain": {"DS111"},  # what Liger would refuse, as information
        },
        "0.29.1": {
            "seed": {"DS103", "DS111"},
            "kl": {"DS105", "DS111"},
            "luspo": {"DS111"},
            "own luspo": {"DS112"},
            "plain": {"DS111"},
        },
        "1.13.0": {
            "seed": {"DS111"},
            "kl": {"DS111"},
            "luspo": {"DS111", "DS113"},
            "own luspo": set(),
            "plain": {"DS111"},
        },
        "1.16.0": {"seed": set(), "kl": set(), "luspo": set(), "own luspo": set(), "plain": set()},
    }
    assert {name: set(codes) for name, codes in found["foreseen"].items()} == wanted[found["versions"]["trl"]]


# -- a pair that nobody has seen -------------------------------------------------------------------------------------
