"""A window's gradients as the record shows them."""

from __future__ import annotations

import math

from driftscope.hooks.gradients import Found
from driftscope.records import BiasRecord, Estimate, GradientRecord, ModuleGradient, StepRecord
from driftscope.sketch import Bias, Figure, Pair, cosine, difference, modules, norm, ratio

MODULES = 32  # modules on record, those with the largest share of the difference


def fill_gradient(record: StepRecord, found: Found, bias: Bias | None) -> None:
    """``gradient``, ``param_grad_norm`` of both paths and their ratio in ``gap``.

    Where something is not finite, it is named and no figure stands.
    """
    out = GradientRecord(method="exact" if found.size is None else "sketch", size=found.size)
    record.gradient = out
    out.bias = bias_record(bias) if bias is not None else None
    if found.nonfinite:
        record.nonfinite += [f"gradient.{name}" for name in found.nonfinite]
        return
    if found.accumulated is not None:
        out.accumulated = _estimate(difference(found.accumulated))
    norms = _norms(found)
    if found.other is not None and found.pair is not None:
        candidate_is_live = record.gap is None or record.gap.candidate != found.other
        pair = found.pair if candidate_is_live else found.pair.swapped()
        sides = (found.live, found.other) if candidate_is_live else (found.other, found.live)
        out.candidate, out.reference = sides
        _compare(out, pair)
        if record.gap is not None and (record.gap.candidate, record.gap.reference) == sides and out.norm_ratio:
            record.gap.param_grad_norm_ratio = out.norm_ratio.value
    out.norms = {name: Estimate(value=f.value, error=f.error) for name, f in norms.items()}
    for name, figure in norms.items():
        if name in record.paths:
            record.paths[name].param_grad_norm = figure.value


def _compare(out: GradientRecord, pair: Pair) -> None:
    out.norm_ratio, out.cosine, out.difference = (_estimate(f(pair)) for f in (ratio, cosine, difference))
    out.modules = [
        ModuleGradient(name=m.name, candidate=m.a, reference=m.b, cosine=m.cosine, share=m.share)
        for m in modules(pair, MODULES)
    ]


def _norms(found: Found) -> dict[str, Figure]:
    """L2 norms by path.

    Sketched, the live norm is the exact norm of what was accumulated times the estimated ratio of the two: they are
    nearly parallel, so that the ratio has hardly any error; the other's is the live norm over their ratio.
    """
    assert found.pair is not None
    live = norm(found.pair)
    if found.size is not None and found.accumulated is not None and found.norm:
        scaled = ratio(found.accumulated.swapped())
        if scaled is not None:
            live = Figure(found.norm * scaled.value, found.norm * scaled.error)
    norms = {found.live: live}
    if found.other is None:
        return norms
    turned = ratio(found.pair.swapped())
    other = norm(found.pair, "b")
    if turned is not None and live.value > 0:
        error = math.hypot(live.error * turned.value, live.value * turned.error)
        if error < other.error or found.size is None:
            other = Figure(live.value * turned.value, error)
    norms[found.other] = other
    return norms


def bias_record(bias: Bias) -> BiasRecord:
    """A bias as the record holds it."""
    return BiasRecord(
        steps=bias.steps,
        size=Estimate(value=bias.size.value, error=bias.size.error),
        noise=bias.noise,
        score=bias.score,
        along=Estimate(value=bias.along.value, error=bias.along.error),
        module=bias.module,
        along_module=bias.along_module,
    )


def _estimate(figure: Figure | None) -> Estimate | None:
    return Estimate(value=figure.value, error=figure.error) if figure is not None else None
