"""A capsule made without a trainer: a linear head, a batch, and the gradient that a chosen loss sends."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from driftscope.algebra import coefficients, importance_ratio
from driftscope.batch import TokenBatch
from driftscope.capsule import Capsule, read_capsule, write_capsule
from driftscope.capsule import replay as compute
from driftscope.capsule.format import JSON_NAME, TENSORS_NAME, _digest
from driftscope.mismatch import Mismatch
from driftscope.spec import LossSpec
from driftscope.spectrum import Head, measure
from tests.record_factory import honest_ratio, info, step

B, T, D, V = 4, 6, 8, 29
SPEC = LossSpec(loss_type="dapo", is_correction=True, is_mode="token_truncate", temperature=0.9, accumulation_steps=1)
BROKEN = SPEC.replace(is_correction=False)


def sample(*, live_spec=SPEC, mismatch=0.0, seed=0, entropy=0.0):
    """A capsule whose live path trains on ``live_spec`` where ``SPEC`` is configured.

    mismatch: nats a token by which the engine's log-probs are over the trainer's. Its record is the replay's own.
    """
    spec = SPEC.replace(entropy_coef=entropy)
    live_spec = live_spec.replace(entropy_coef=entropy)
    made = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(B, T, D, generator=made), torch.randn(V, D, generator=made)
    ids = torch.randint(V, (B, T), generator=made)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 4:] = 0
    leaf = hidden.clone().requires_grad_(True)
    log_p = (leaf @ weight.T / spec.temperature).log_softmax(-1)
    logps_BT = log_p.gather(-1, ids[..., None])[..., 0]
    entropies_BT = -(log_p.exp() * log_p).sum(-1)
    old = (logps_BT + 0.01 * torch.randn(B, T, generator=made)).detach()
    batch = TokenBatch(
        logps_BT=logps_BT.detach(),
        entropies_BT=entropies_BT.detach(),
        completion_mask_BT=mask,
        advantages=torch.randn(B, generator=made),
        old_logps_BT=old,
        sampling_logps_BT=old + mismatch + 1e-4 * torch.randn(B, T, generator=made),
        num_items_in_batch=float(mask.sum()),
    )
    batch = replace(batch, is_ratio=importance_ratio(spec, batch))
    reference, live = coefficients(spec, batch), coefficients(live_spec, batch)
    total = (live.logps_BT.float() * logps_BT).sum()
    if live.entropies_BT is not None:
        total = total + (live.entropies_BT.float() * entropies_BT).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    rows = mask.bool()
    head = {"model": Head(lambda h: h @ weight.T)}
    passed = measure(
        head, hidden[rows], ids[rows], grad[rows], temperature=spec.temperature, rows=100, entropy=entropy != 0.0
    )
    tensors = {
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_logps": old,
        "sampling_logps": batch.sampling_logps_BT,
        "is_ratio": batch.is_ratio,
        "rows": rows,
        "gg": passed.gg_N,
        "reference.c": reference.logps_BT,
        "hidden_rows": torch.arange(int(rows.sum())),
        "hidden": hidden[rows],
        "hidden_grad": grad[rows],
        "head.weight": weight,
        **{
            f"view.model.{name.removesuffix('_N')}": value
            for name, value in vars(passed.views["model"]).items()
            if value is not None
        },
    }
    if reference.entropies_BT is not None:
        tensors["reference.e"] = reference.entropies_BT
    measured = {
        "live": "liger",
        "dtype": "float32",
        "autocast": None,
        "heads": {"model": False},
        "transform": {
            "softcap": None, "scale": 1.0, "adapter": False, "other": False, "joined": True, "difference": 0.0,
        },
        "sampling": {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        "num_items_in_batch": batch.num_items_in_batch,
        "rank_mean_tokens": batch.rank_mean_tokens,
        "scatter": 16,
        "losses": {"reference": reference.loss},
        "liger_call": None,
    }  # fmt: skip
    record = step(is_ratio=honest_ratio(), mismatch=Mismatch(), tokens=int(mask.sum()))
    made_of = Capsule(
        record=record, spec=spec, info=info(versions={"torch": "2.13.0"}), tensors=tensors, measured=measured
    )
    again = compute(made_of)
    assert not again.failed
    return replace(made_of, record=again.record, findings=again.findings)


def saved(directory, **options):
    """A sample on disk; returns its directory."""
    return write_capsule(directory / "capsule", sample(**options))


def reseal(path, change_json=None, change_tensors=None):
    """Change a capsule on disk and put its digests right again, as somebody who wrote his own would."""
    if change_tensors is not None:
        tensors = load_file(str(path / TENSORS_NAME))
        change_tensors(tensors)
        save_file(tensors, str(path / TENSORS_NAME))
    document = json.loads((path / JSON_NAME).read_text())
    document["tensors"]["sha256"] = hashlib.sha256((path / TENSORS_NAME).read_bytes()).hexdigest()
    if change_tensors is not None:
        document["tensors"]["shapes"] = {
            k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()
        }
    if change_json is not None:
        document = change_json(document) or document
    document.pop("digest", None)
    (path / JSON_NAME).write_text(json.dumps({"digest": _digest(document), **document}))
    return path


__all__ = ["BROKEN", "SPEC", "compute", "read_capsule", "reseal", "sample", "saved"]
