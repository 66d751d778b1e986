"""What a capsule must hold to be replayed: every tensor's shape and dtype, every setting's type.

A capsule comes from another machine, so nothing in it is taken on trust. NaN and infinity in tensors are not refused:
a run that went wrong that way is what a capsule may be about.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftscope.errors import CapsuleError
from driftscope.records import StepRecord
from driftscope.spec import LossSpec

HEADS = ("model", "raw")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GRID = ("completion_ids", "completion_mask", "rows")
OPTIONAL_GRID = ("tool_mask", "old_logps", "ref_logps", "sampling_logps", "reference.c", "reference.e", "liger.c")
PRODUCTS = ("logps", "entropies", "uu", "gu")
ENTROPY_PRODUCTS = ("uw", "ww", "gw")
SAMPLING: dict[str, type[int] | type[float]] = {"top_p": float, "top_k": int, "min_p": float}
_PATHS = ("liger", "reference", "corrected")


def read_measured(measured: dict[str, Any]) -> dict[str, Any]:
    """The capsule's ``measured``, every entry of its right type; raises whatever a wrong one makes Python raise.

    live: path that trains. dtype: what the head computes in. autocast: its dtype where it was on. heads: name ->
    taken the fused way. transform: the head's (``HeadTransform``). sampling: top_p, top_k, min_p.
    num_items_in_batch, rank_mean_tokens: as the batch had them. scatter: points kept. losses: of the paths' own code.
    liger_call: how the trainer called Liger.
    """
    heads = measured["heads"]
    if not isinstance(heads, dict) or "model" not in heads or not set(heads) <= set(HEADS):
        raise ValueError("measured.heads must name 'model', and may name 'raw'")
    if measured["live"] not in _PATHS:
        raise ValueError(f"measured.live={measured['live']!r} is no path that can train")
    for name in ("dtype", "autocast"):
        if measured[name] not in DTYPES and not (name == "autocast" and measured[name] is None):
            raise ValueError(f"measured.{name}={measured[name]!r} is no floating dtype")
    sampling, items = measured["sampling"], measured["num_items_in_batch"]
    transform, call = measured["transform"], measured["liger_call"]
    return {
        **measured,
        "heads": {k: bool(v) for k, v in heads.items()},
        "num_items_in_batch": None if items is None else float(items),
        "rank_mean_tokens": _pair(measured.get("rank_mean_tokens")),
        "scatter": int(measured["scatter"]),
        "sampling": {
            "top_p": float(sampling["top_p"]),
            "top_k": int(sampling["top_k"]),
            "min_p": float(sampling["min_p"]),
        },
        "transform": {
            "softcap": None if transform["softcap"] is None else float(transform["softcap"]),
            "scale": float(transform["scale"]),
            "adapter": bool(transform["adapter"]),
            "other": bool(transform["other"]),
            "joined": bool(transform["joined"]),
            "difference": float(transform["difference"]),
        },
        "losses": {str(k): float(v) for k, v in measured["losses"].items() if v is not None},
        "liger_call": dict(call) if call is not None else None,
    }


def check_tensors(
    directory: Path, tensors: dict[str, Tensor], record: StepRecord, spec: LossSpec, measured: dict[str, Any]
) -> None:
    """Raises ``CapsuleError`` for a tensor that is missing, or whose shape, dtype or values cannot be."""
    missing = [name for name in (*GRID, "advantages", "gg") if name not in tensors]
    missing += [f"view.{head}.{name}" for head in measured["heads"] for name in PRODUCTS]
    missing = [name for name in missing if name not in tensors]
    if spec.beta != 0.0 and "ref_logps" not in tensors:
        missing.append("ref_logps")
    if missing:
        raise CapsuleError(f"{directory} is no complete capsule: it lacks the tensors {', '.join(missing)}.")
    wrong = _wrong_grid(tensors) or _wrong_rows(tensors, list(measured["heads"])) or _wrong_hidden(tensors)
    if wrong is None and record.live != measured["live"]:
        wrong = f"its record trains on {record.live!r}, its tensors are of {measured['live']!r}"
    if wrong is not None:
        raise CapsuleError(f"{directory} cannot be replayed: {wrong}. It was not saved like this by Driftscope.")


def _wrong_grid(tensors: dict[str, Tensor]) -> str | None:
    ids = tensors["completion_ids"]
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0:
        return f"completion_ids is {_say(ids)}, not a (B, T) array of token ids"
    sequences, length = ids.shape
    for name in (*GRID, *OPTIONAL_GRID):
        value = tensors.get(name)
        if value is not None and value.shape != ids.shape:
            return f"{name} is {_say(value)} where completion_ids is {_say(ids)}"
    for name in ("advantages", "is_ratio"):
        value = tensors.get(name)
        if value is not None and tuple(value.shape) not in ((sequences,), (sequences, 1), (sequences, length)):
            return f"{name} is {_say(value)} for {sequences} sequences of {length} tokens"
    for name in ("advantages", "is_ratio", *OPTIONAL_GRID[1:]):
        value = tensors.get(name)
        if value is not None and not value.is_floating_point():
            return f"{name} is {_say(value)}, not floating"
    for name in ("completion_mask", "tool_mask", "rows"):
        value = tensors.get(name)
        if value is not None and not bool(((value == 0) | (value == 1)).all()):
            return f"{name} is not a mask of zeros and ones"
    return None if tensors["rows"].dtype == torch.bool else f"rows is {_say(tensors['rows'])}, not boolean"


def _wrong_rows(tensors: dict[str, Tensor], heads: list[str]) -> str | None:
    count = int(tensors["rows"].sum())
    names = [n for n in tensors if n in ("gg", "kept_mass") or n.startswith(("view.", "cross."))]
    for name in names:
        value = tensors[name]
        if tuple(value.shape) != (count,) or not value.is_floating_point():
            return f"{name} is {_say(value)} for {count} rows of the head pass"
    for head in heads:
        entropy = [f"view.{head}.{name}" in tensors for name in ENTROPY_PRODUCTS]
        if any(entropy) and not all(entropy):
            return f"the entropy products of the head {head!r} are incomplete"
    if len(heads) > 1 and "cross.model.raw" not in tensors:
        return "cross.model.raw is missing"
    return None if count else "no row is marked in rows"


def _wrong_hidden(tensors: dict[str, Tensor]) -> str | None:
    weight, bias = tensors.get("head.weight"), tensors.get("head.bias")
    ids, rows = tensors["completion_ids"], tensors["rows"]
    if bool((ids[rows] < 0).any()):
        return "completion_ids holds negative ids"
    if weight is not None:
        if weight.dim() != 2 or not weight.is_floating_point():
            return f"head.weight is {_say(weight)}"
        if int(ids[rows].max()) >= weight.shape[0]:
            return f"completion_ids holds ids beyond the vocabulary of {weight.shape[0]}"
        if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or not bias.is_floating_point()):
            return f"head.bias is {_say(bias)} for a vocabulary of {weight.shape[0]}"
    hidden = [tensors.get(name) for name in ("hidden_rows", "hidden", "hidden_grad")]
    if all(value is None for value in hidden):
        return None
    index, states, grads = hidden
    if index is None or states is None or grads is None:
        return "hidden_rows, hidden and hidden_grad are saved together, and one of them is missing"
    size = weight.shape[1] if weight is not None else states.shape[-1] if states.dim() == 2 else 0
    shape = (index.numel(), size)
    if tuple(states.shape) != shape or tuple(grads.shape) != shape or not states.is_floating_point():
        return f"hidden is {_say(states)} and hidden_grad {_say(grads)} for {index.numel()} rows of size {size}"
    if index.dim() != 1 or index.dtype != torch.int64 or index.numel() == 0 or not grads.is_floating_point():
        return f"hidden_rows is {_say(index)}"
    ordered = bool((index[1:] > index[:-1]).all())
    inside = int(index.min()) >= 0 and int(index.max()) < int(rows.sum())
    return None if ordered and inside else "hidden_rows are no rows of the head pass in their order"


def _say(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"


def _pair(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    with_tools, without = value
    return float(with_tools), float(without)
