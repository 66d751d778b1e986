"""The head pass of a capsule: measured again from its hidden states where it has them, else as it was saved.

Shapes: N rows of the head pass, n of them with hidden states, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from driftscope import is_ratio
from driftscope.attribute import Scene
from driftscope.batch import TokenBatch
from driftscope.capsule.checks import DTYPES
from driftscope.capsule.format import Capsule
from driftscope.kernels import Directions, fused_linear_logprobs, linear_directions
from driftscope.spectrum import Head, HeadView, Spectrum, measure, tile_rows

WORKSPACE_BYTES = 256 * 2**20
_VIEW = tuple(HeadView.__dataclass_fields__)


@dataclass(frozen=True)
class Replayed:
    """The head pass again: ``how`` says of each head what was done."""

    spectrum: Spectrum
    how: dict[str, str]


def saved_spectrum(capsule: Capsule) -> Spectrum:
    """The head pass as the run made it."""
    t = capsule.tensors
    views = {
        head: HeadView(**{name: t.get(f"view.{head}.{name.removesuffix('_N')}") for name in _VIEW})  # type: ignore[arg-type]
        for head in capsule.measured["heads"]
    }
    cross = {("model", "raw"): t["cross.model.raw"]} if len(views) > 1 else {}
    return Spectrum(views, t["gg"], cross, t.get("kept_mass"))


def head_pass(capsule: Capsule) -> Replayed:
    """The head pass, measured again on every row whose hidden states the capsule holds."""
    saved, t = saved_spectrum(capsule), capsule.tensors
    heads = capsule_heads(capsule)
    if "hidden" not in t or not heads:
        why = "the head's weight is not in the capsule" if "hidden" in t else "hidden states are not in the capsule"
        return Replayed(saved, dict.fromkeys(saved.views, f"products as the run measured them: {why}"))
    index, size = t["hidden_rows"], int(t["rows"].sum())
    kept, chosen = _kept(capsule, saved, index)
    with autocast(capsule):
        made = measure(
            heads,
            t["hidden"],
            t["completion_ids"][t["rows"]][index],
            t["hidden_grad"],
            temperature=capsule.spec.temperature,
            rows=tile_rows(t["head.weight"].shape[0], WORKSPACE_BYTES),
            entropy=saved.views["model"].ww_N is not None,
            kept=kept if "model" in heads else None,
            kept_rows=chosen,
        )
    share = "every row" if index.numel() == size else f"{index.numel()} of {size} rows, the others as the run had them"
    how = dict.fromkeys(heads, f"measured again from hidden states and lm_head, {share}")
    for head in saved.views.keys() - heads.keys():
        how[head] = "products as the run measured them: its logits are more than lm_head, a scale and a softcap"
    return Replayed(_merge(saved, made, index), how)


def capsule_heads(capsule: Capsule) -> dict[str, Head]:
    """The heads whose logits can be made from the capsule, by name."""
    weight = capsule.tensors.get("head.weight")
    if weight is None:
        return {}
    transform, out = capsule.measured["transform"], {}
    for name, fused in capsule.measured["heads"].items():
        plain = name == "raw" or _plain(transform)
        if plain or transform["joined"]:
            scale, softcap = (1.0, None) if plain else (transform["scale"], transform["softcap"])
            out[name] = _head(capsule, weight, scale, softcap, fused=fused)
    return out


def _plain(transform: dict[str, object]) -> bool:
    return not (transform["softcap"] or transform["adapter"] or transform["other"]) and transform["scale"] == 1.0


def _head(capsule: Capsule, weight: Tensor, scale: float, softcap: float | None, *, fused: bool) -> Head:
    bias, temperature = capsule.tensors.get("head.bias"), float(capsule.spec.temperature)

    def logits(hidden: Tensor) -> Tensor:
        raw = scale * torch.nn.functional.linear(hidden, weight, bias)
        return softcap * torch.tanh(raw / softcap) if softcap else raw

    settings: dict[str, Any] = {
        "bias": bias,
        "temperature": temperature,
        "softcap": softcap,
        "logit_scale": scale,
        "workspace_bytes": max(WORKSPACE_BYTES, weight.shape[0] * 16),
    }

    def quick(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logps, entropies = fused_linear_logprobs(hidden, weight, targets, with_entropy=True, **settings)
        assert entropies is not None
        return logps, entropies

    def directions(hidden: Tensor, targets: Tensor, entropy: bool) -> Directions:
        return linear_directions(hidden, weight, targets, with_entropy=entropy, **settings)

    return Head(logits, quick, directions) if fused else Head(logits)


def autocast(capsule: Capsule) -> torch.autocast:
    """Autocast as the run had it, on the CPU."""
    name = capsule.measured["autocast"]
    return torch.autocast("cpu", dtype=DTYPES[name or "bfloat16"], enabled=name is not None)


def _kept(capsule: Capsule, saved: Spectrum, index: Tensor) -> tuple[Callable[[Tensor], Tensor] | None, Tensor | None]:
    """The kept-mass function of the run's sampling, and the rows it had it on."""
    if saved.kept_mass_N is None:
        return None, None
    settings = capsule.measured["sampling"]
    return (lambda log_p: is_ratio.kept_mass(log_p, **settings)), ~torch.isnan(saved.kept_mass_N[index])


def _merge(saved: Spectrum, made: Spectrum, index: Tensor) -> Spectrum:
    """The saved head pass with the rows in ``index`` from the one made again."""

    def put(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return old if old is None or new is None else old.to(new.dtype).index_copy(0, index, new)

    views = dict(saved.views)
    for head, new in made.views.items():
        old = views[head]
        changed: dict[str, Any] = {name: put(getattr(old, name), getattr(new, name)) for name in _VIEW}
        views[head] = replace(old, **changed)
    gg_N = put(saved.gg_N, made.gg_N)
    assert gg_N is not None
    cross = {
        pair: value if (again := put(value, made.cross_N.get(pair))) is None else again
        for pair, value in saved.cross_N.items()
    }
    return Spectrum(views, gg_N, cross, put(saved.kept_mass_N, made.kept_mass_N))


def scene_of(capsule: Capsule, spectrum: Spectrum) -> Scene:
    """The micro-batch for attribution, as the run's head pass lays it out."""
    rows_BT = capsule.tensors["rows"]
    batches = {}
    for name, view in spectrum.views.items():
        old = capsule.tensors.get("old_logps")
        dtype = view.logps_N.dtype
        logps_BT = old.to(dtype).clone() if old is not None else torch.zeros(rows_BT.shape, dtype=dtype)
        logps_BT[rows_BT] = view.logps_N
        entropies_BT = torch.zeros(rows_BT.shape, dtype=view.entropies_N.dtype)
        entropies_BT[rows_BT] = view.entropies_N
        batches[name] = token_batch(capsule, logps_BT, entropies_BT)
    return Scene(batches=batches, spectrum=spectrum, rows_BT=rows_BT)


def token_batch(capsule: Capsule, logps_BT: Tensor, entropies_BT: Tensor | None) -> TokenBatch:
    """The algebra's batch of the capsule with these log-probs (B, T)."""
    t = capsule.tensors
    return TokenBatch(
        logps_BT=logps_BT,
        entropies_BT=entropies_BT,
        completion_mask_BT=t["completion_mask"],
        tool_mask_BT=t.get("tool_mask"),
        advantages=t["advantages"],
        old_logps_BT=t.get("old_logps"),
        ref_logps_BT=t.get("ref_logps"),
        sampling_logps_BT=t.get("sampling_logps"),
        is_ratio=t.get("is_ratio"),
        num_items_in_batch=capsule.measured["num_items_in_batch"],
        rank_mean_tokens=capsule.measured["rank_mean_tokens"],
    )


def policy_mask_BT(capsule: Capsule) -> Tensor:
    """Tokens that the loss should train on, (B, T)."""
    mask, tools = capsule.tensors["completion_mask"], capsule.tensors.get("tool_mask")
    return mask if tools is None else mask * tools
