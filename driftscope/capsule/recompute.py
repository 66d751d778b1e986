"""A capsule computed again: every path, every figure and every finding that needs no model.

The live path is measured again from the hidden gradient; the reference and the oracle come from the float64 algebra
on the saved log-probs, Liger's path from its own code where the same Liger is installed. What only the run could
measure (parameter gradients, the canary, the step's times) is carried over and named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from driftscope import is_ratio
from driftscope.algebra import raw_log_ratio_BT
from driftscope.attribute import Scene, identify
from driftscope.batch import Coefficients, TokenBatch
from driftscope.capsule import liger_call
from driftscope.capsule.checks import DTYPES
from driftscope.capsule.figures import Figure, compare_records
from driftscope.capsule.format import Capsule
from driftscope.capsule.headpass import (
    Replayed,
    autocast,
    capsule_heads,
    head_pass,
    policy_mask_BT,
    scene_of,
    token_batch,
)
from driftscope.hooks.compare import Comparison, Paths
from driftscope.hooks.head import HeadTransform
from driftscope.mismatch import figures as mismatch_figures
from driftscope.mismatch import measure_mismatch
from driftscope.records import AlertRecord, IsRatio, PathRecord, StepRecord
from driftscope.rules import Thresholds, evaluate, registry
from driftscope.spec import LossSpec
from driftscope.spectrum import score, solve

MODEL_HEAD, RAW_HEAD = "model", "raw"
ALGEBRA = "the algebra in float64 on the saved log-probs"
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Replay:
    """A capsule's record computed again, and how far it is from the saved one.

    how: path or signal -> how its numbers were had. failed: what could not be computed again, and why.
    carried: findings of the alarm that were not made on this record: on other micro-batches, or over many steps.
    """

    record: StepRecord
    findings: list[AlertRecord] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    how: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    carried: list[AlertRecord] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether every figure and every finding came out again."""
        return not (self.lost or self.new or self.failed) and all(f.same for f in self.figures)

    def run(self, stage: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """One stage; an error makes it unavailable, and the others go on."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - told as unavailable
            self.failed[stage] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None


def replay(capsule: Capsule) -> Replay:
    """Compute a capsule again. Never raises for one that ``read_capsule`` accepted."""
    out = Replay(_blank(capsule))
    out.run("is_ratio", _ratio, capsule, out)
    out.run("mismatch", _mismatch, capsule, out)
    passed = out.run("head", head_pass, capsule)
    scale = 1.0
    if passed is not None:
        scale = out.run("paths", _paths, capsule, passed, out) or scale
    dtype = DTYPES[capsule.measured["dtype"]]
    out.figures = compare_records(capsule.record, out.record, eps=torch.finfo(dtype).eps, loss_scale=scale)
    out.run("findings", _judge, capsule, out)
    return out


def _blank(capsule: Capsule) -> StepRecord:
    """The saved record without what is computed again."""
    saved = capsule.record
    live = saved.paths.get(saved.live)
    again = dict.fromkeys(("gap", "is_ratio", "mismatch", "unexplained", "residual"))
    record = saved.model_copy(update={**again, "paths": {}, "causes": [], "scatter": [], "nonfinite": []}, deep=True)
    record.paths[record.live] = PathRecord(loss=live.loss if live is not None else None, source="measured")
    record.nonfinite = [n for n in saved.nonfinite if n.startswith("inputs.") or n.endswith("grad_norm")]
    return record


# -- sampling ---------------------------------------------------------------------------------------------------------


def _ratio(capsule: Capsule, out: Replay) -> None:
    spec, t, record, saved = capsule.spec, capsule.tensors, out.record, capsule.record
    if saved.is_ratio is None:
        return
    if t.get("sampling_logps") is None or t.get("old_logps") is None:
        record.is_ratio = IsRatio(mode=spec.is_mode, note=saved.is_ratio.note)
        return
    mask, applied = policy_mask_BT(capsule), t.get("is_ratio")
    log_ratio = raw_log_ratio_BT(spec, token_batch(capsule, t["old_logps"], None))
    record.is_ratio = is_ratio.describe_ratio(spec, log_ratio, mask, applied)
    out.how["is_ratio"] = "the saved log-probs of trainer and engine"


def _mismatch(capsule: Capsule, out: Replay) -> None:
    spec, t = capsule.spec, capsule.tensors
    if capsule.record.mismatch is None or t.get("sampling_logps") is None or t.get("old_logps") is None:
        return
    out.record.mismatch = mismatch_figures(
        measure_mismatch(
            t["old_logps"],
            t["sampling_logps"],
            policy_mask_BT(capsule),
            applied=t.get("is_ratio"),
            applied_level="sequence" if spec.is_mode.startswith("sequence") else "token",
            cap=spec.is_cap,
            floor=spec.is_floor,
        )
    )
    out.how["mismatch"] = out.how.get("is_ratio", "the saved log-probs of trainer and engine")


def _explain_ratio(capsule: Capsule, scene: Scene, out: Replay) -> None:
    """Kept mass and the causes of the ratio; the canary's causes need the model and are carried over."""
    record, kept_N = out.record, scene.spectrum.kept_mass_N
    if record.is_ratio is None:
        return
    if kept_N is not None:
        log_ratio = raw_log_ratio_BT(capsule.spec, scene.batches[MODEL_HEAD])[scene.rows_BT]
        sums = is_ratio.sum_kept_mass(log_ratio, kept_N)
        if sums is not None:
            is_ratio.truncated_support(record.is_ratio, sums)
    if record.canary is not None and capsule.record.is_ratio is not None:
        record.is_ratio.causes = [cause.model_copy() for cause in capsule.record.is_ratio.causes]
        out.how["is_ratio.causes"] = "as saved: the canary scores tokens with the model"


# -- paths ------------------------------------------------------------------------------------------------------------


def _paths(capsule: Capsule, passed: Replayed, out: Replay) -> float:
    """Fill the record's paths, gap and causes; returns the scale of a loss: the largest sum of |coefficients|."""
    scene, record, spec, live = scene_of(capsule, passed.spectrum), out.record, capsule.spec, capsule.measured["live"]
    out.run("kept_mass", _explain_ratio, capsule, scene, out)
    out.how[live] = "; ".join(sorted({*passed.how.values()}))
    measured = {name: solve(scene.spectrum, name) for name in scene.spectrum.views}
    transform = HeadTransform(**capsule.measured["transform"])
    dtype = DTYPES[capsule.measured["dtype"]]
    oracle = out.run("oracle", scene.coefficients, spec, MODEL_HEAD)
    out.how["oracle"] = ALGEBRA

    def compared(reference: Coefficients | None, liger: Coefficients | None) -> Comparison:
        return Comparison(spec, scene, Paths(live, measured, reference, liger, oracle), transform, dtype)

    tolerance = compared(None, None).tolerance
    reference = _by_algebra(capsule, scene, "reference", MODEL_HEAD, tolerance)
    raw = RAW_HEAD if RAW_HEAD in scene.spectrum.views else MODEL_HEAD
    liger = _liger(capsule, scene, raw, tolerance, transform)
    comparison = compared(reference.path if reference else None, liger.path if liger else None)
    comparison.fill(record, scatter=capsule.measured["scatter"])
    for name, made, head in (("reference", reference, MODEL_HEAD), ("liger", liger, raw)):
        if made is not None and name != live:
            out.how[name] = made.how
            _own_error(capsule, scene, comparison, name, head, record)
    corrected = capsule.record.paths.get("corrected")
    if corrected is not None and corrected.source == "fused_call":
        out.run("corrected", _corrected, capsule, scene, reference.spec if reference else spec, out)
    for name, path in capsule.record.paths.items():
        if name not in record.paths:
            record.paths[name] = path.model_copy()
            out.how[name] = f"unavailable: {path.note or 'the capsule does not hold what it needs'}"
        record.paths[name].note = path.note
        record.paths[name].param_grad_norm = path.param_grad_norm
        record.paths[name].fused_call_error = path.fused_call_error
    if record.gap is not None and capsule.record.gap is not None:
        record.gap.param_grad_norm_ratio = capsule.record.gap.param_grad_norm_ratio
    if live == "liger" and liger is not None:
        error = scene.distance(comparison.coefs["liger"], scene.at_rows(liger.path, raw))
        out.how["liger code"] = f"{liger.how}; the measured gradient agrees with it to {error:.2g}"
    return max((float(path.c_N.abs().sum()) for path in comparison.coefs.values()), default=1.0)


def _grid(capsule: Capsule, name: str) -> Coefficients | None:
    """The coefficients that a path's own code gave in the run."""
    c_BT = capsule.tensors.get(f"{name}.c")
    if c_BT is None:
        return None
    loss = capsule.measured["losses"].get(name, float("nan"))
    return Coefficients(loss=loss, logps_BT=c_BT, entropies_BT=capsule.tensors.get(f"{name}.e"))


@dataclass(frozen=True)
class _Made:
    """A path made again: its coefficients, the spec that gives them, and how in words."""

    path: Coefficients
    spec: LossSpec
    how: str


def _by_algebra(
    capsule: Capsule, scene: Scene, name: str, head: str, tolerance: float, head_cause: str | None = None
) -> _Made | None:
    """A path from the float64 algebra of the spec that it realises; as it was saved where no spec does."""
    saved = _grid(capsule, name)
    if saved is None:
        return None
    path = scene.at_rows(saved, head)
    found = identify(scene, capsule.spec, MODEL_HEAD, path, tolerance=tolerance, head_cause=head_cause)
    if found.error > tolerance:
        off = f"coefficients as its own code gave them in the run: no known spec gives them ({found.error:.2g} off)"
        return _Made(saved, capsule.spec, off)
    words = ", ".join(change.cause for change in found.changes)
    return _Made(scene.coefficients(found.spec, head), found.spec, ALGEBRA + (f", without {words}" if words else ""))


def _liger(capsule: Capsule, scene: Scene, head: str, tolerance: float, transform: HeadTransform) -> _Made | None:
    """Liger's path: by its own code where the capsule's Liger is installed, else by the algebra."""
    made = _by_algebra(capsule, scene, "liger", head, tolerance, transform.cause)
    if made is None:
        return None
    here, there = _installed("liger-kernel"), capsule.info.versions.get("liger-kernel") if capsule.info else None
    if here is None or here != there:
        why = f"Liger {there} is not installed here" + (f", {here} is" if here else "")
        return replace(made, how=f"{made.how} (own code unavailable: {why})")
    try:
        own = liger_call.again(capsule, scene.batches[head].logps_BT)
    except Exception as error:  # noqa: BLE001 - told, and the algebra stands in
        return replace(made, how=f"{made.how} (own code unavailable: {' '.join(str(error).split())[:200]})")
    return replace(made, path=own, how=f"Liger {here}'s own code on the saved log-probs")


def _own_error(
    capsule: Capsule, scene: Scene, comparison: Comparison, name: str, head: str, record: StepRecord
) -> None:
    """A path's error against the oracle is that of its own code's coefficients, not of the algebra that follows it."""
    saved = _grid(capsule, name)
    if saved is None or "oracle" not in comparison.coefs or name not in record.paths:
        return
    error = scene.distance(scene.at_rows(saved, head), comparison.coefs["oracle"])
    record.paths[name].coef_error = error if math.isfinite(error) else None


def _corrected(capsule: Capsule, scene: Scene, spec: LossSpec, out: Replay) -> None:
    """The corrected path's call: the fused head, the reference's algebra on its log-probs, and back."""
    t, saved = capsule.tensors, capsule.record.paths["corrected"]
    heads = capsule_heads(capsule)
    if "hidden" not in t or t["hidden_rows"].numel() < int(t["rows"].sum()) or MODEL_HEAD not in heads:
        out.record.paths["corrected"] = saved.model_copy()
        out.how["corrected"] = "as saved: its call needs lm_head and the hidden states of every row"
        return
    rows, oracle = t["rows"], scene.path(capsule.spec, MODEL_HEAD)
    with torch.enable_grad(), autocast(capsule):
        leaf = t["hidden"].clone().requires_grad_(True)
        logps, entropies = score(heads[MODEL_HEAD], leaf, t["completion_ids"][rows], capsule.spec.temperature)
        made = Scene({MODEL_HEAD: _with(scene, logps, entropies)}, scene.spectrum, rows).coefficients(spec, MODEL_HEAD)
        total = (made.logps_BT[rows].to(logps.dtype) * logps).sum()
        if made.entropies_BT is not None:
            total = total + (made.entropies_BT[rows].to(logps.dtype) * entropies).sum()
        (grad,) = torch.autograd.grad(total, leaf)
    out.record.paths["corrected"] = PathRecord(
        loss=made.loss,
        hidden_grad_norm=float(torch.linalg.vector_norm(grad, dtype=torch.float64)),
        normalizer=out.record.paths["oracle"].normalizer if "oracle" in out.record.paths else None,
        coef_error=_gradient_error(capsule, grad, oracle.c_N, oracle.e_N),
        source="fused_call",
    )
    out.how["corrected"] = "the fused head on the saved hidden states, and the algebra in float64"


def _with(scene: Scene, logps: Tensor, entropies: Tensor) -> TokenBatch:
    """The scene's batch with other log-probs and entropies (N,) on the rows of the head pass."""
    batch, rows = scene.batches[MODEL_HEAD], scene.rows_BT
    assert batch.entropies_BT is not None
    logps_BT, entropies_BT = batch.logps_BT.to(logps.dtype).clone(), batch.entropies_BT.to(logps.dtype).clone()
    logps_BT[rows], entropies_BT[rows] = logps.detach(), entropies.detach()
    return replace(batch, logps_BT=logps_BT, entropies_BT=entropies_BT)


def _gradient_error(capsule: Capsule, grad: Tensor, c_N: Tensor, e_N: Tensor | None) -> float | None:
    """Relative difference of a hidden gradient (N, D) from the one that coefficients make."""
    swapped = replace(capsule, tensors={**capsule.tensors, "hidden_grad": grad.float()})
    spectrum = head_pass(swapped).spectrum
    view, size = spectrum.views[MODEL_HEAD], spectrum.squared_N(MODEL_HEAD, c_N, e_N)
    left = spectrum.gg_N - 2 * c_N * view.gu_N + size
    if e_N is not None and view.gw_N is not None:
        left = left - 2 * e_N * view.gw_N
    total = float(size.sum())
    return float((left.clamp(min=0).sum() / total).sqrt()) if total > 0 else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- findings ---------------------------------------------------------------------------------------------------------


def _judge(capsule: Capsule, out: Replay) -> None:
    limits = Thresholds.from_settings(capsule.info.settings if capsule.info is not None else {})
    out.findings = evaluate(out.record, limits, on_error=lambda code, error: None)
    judged = {rule.code for rule in registry() if rule.check is not None}
    then = {(a.rule, a.severity) for a in capsule.findings if a.rule in judged}
    now = {(a.rule, a.severity) for a in out.findings}
    here = {a.rule for a in capsule.findings if a.rule in judged}
    out.carried = [a for a in capsule.alarm if a.rule not in here]
    out.lost = [f"{rule} ({severity})" for rule, severity in sorted(then - now)]
    out.new = [f"{rule} ({severity})" for rule, severity in sorted(now - then)]
