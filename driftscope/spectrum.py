"""The spectrometer: token coefficients of a loss path, measured from the hidden gradient it sent into the trunk.

Shapes: N tokens, D hidden size, V vocabulary. For a head with logits z(h) and ``logp = log_softmax(z/tau)[y]`` every
loss of the family gives ``dL/dh = c * u + e * w`` with ``u = dlogp/dh``, ``c = dL/dlogp`` and, where the loss has an
entropy term, ``w = dH/dh``, ``e = dL/dH``. Given the hidden gradient g, least squares per token returns c (and e),
and the residual says how much of g no coefficient explains. Products are accumulated in float64: the residual is a
small difference of large numbers.

A head whose transform is known gives u, w, log-probs and entropies in one pass, of two products a tile and none for
the head's weight; any other is differentiated through its logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from driftscope.kernels.directions import Directions, DirectionsOf
from driftscope.kernels.products import row_products

Logits = Callable[[Tensor], Tensor]  # (n, D) hidden states -> (n, V) logits, before the temperature
FUSED_ROWS = 4096  # tokens at a time where no logits are held


@dataclass(frozen=True)
class Head:
    """A head: its logits and, where there are any, ways to what it says that never hold them.

    fused: (n, D) hidden states, (n,) targets -> (n,) log-probs and entropies, temperature applied, differentiable.
    directions: hidden states, targets, whether w is wanted -> u, w, log-probs and entropies, temperature applied.
    """

    logits: Logits
    fused: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    directions: DirectionsOf | None = None

    @property
    def holds_logits(self) -> bool:
        """Whether a head pass makes logits of its own, which bounds the rows of a tile."""
        return self.fused is None and self.directions is None


@dataclass(frozen=True)
class HeadView:
    """What one head says about N tokens; products are float64, (N,)."""

    logps_N: Tensor
    entropies_N: Tensor
    uu_N: Tensor  # |u|^2
    gu_N: Tensor  # <g, u>
    uw_N: Tensor | None = None
    ww_N: Tensor | None = None
    gw_N: Tensor | None = None


@dataclass(frozen=True)
class Spectrum:
    """The head pass over one micro-batch, shared by all paths."""

    views: dict[str, HeadView]
    gg_N: Tensor  # |g|^2, float64
    cross_N: dict[tuple[str, str], Tensor]  # <u_a, u_b> of two heads
    kept_mass_N: Tensor | None = None  # NaN where it was not computed

    def norm(self, head: str, c_N: Tensor, e_N: Tensor | None = None) -> float:
        """Hidden gradient norm of a path with these coefficients: sqrt(sum |c u + e w|^2)."""
        return float(self.squared_N(head, c_N, e_N).sum().clamp(min=0).sqrt())

    def squared_N(self, head: str, c_N: Tensor, e_N: Tensor | None = None) -> Tensor:
        """|c u + e w|^2 per token."""
        v = self.views[head]
        c = c_N.double()
        total = c * c * v.uu_N
        if e_N is not None and v.ww_N is not None and v.uw_N is not None:
            e = e_N.double()
            total = total + 2 * c * e * v.uw_N + e * e * v.ww_N
        return total

    def measured_norm(self) -> float:
        """Norm of the measured hidden gradient."""
        return float(self.gg_N.sum().sqrt())


@dataclass(frozen=True)
class Measured:
    """Coefficients measured from a hidden gradient, and what they leave unexplained."""

    c_N: Tensor  # float64
    e_N: Tensor | None
    residual: float  # |g - c u - e w| / |g|, 0 where g is zero
    norm: float  # |g| over all tokens


def tile_rows(vocabulary: int, workspace_bytes: int) -> int:
    """Rows of a logits tile within the budget: fp32 logits, log-softmax and their gradient live at once."""
    return max(1, workspace_bytes // (vocabulary * 4 * 4))


def measure(
    heads: Mapping[str, Head],
    hidden_ND: Tensor,
    targets_N: Tensor,
    grad_ND: Tensor,
    *,
    temperature: float,
    rows: int,
    entropy: bool = False,
    kept: Callable[[Tensor], Tensor] | None = None,
    kept_rows: Tensor | None = None,
) -> Spectrum:
    """One pass over the heads, in tiles of ``rows`` tokens (of ``FUSED_ROWS`` where no head needs its logits).

    hidden_ND, targets_N, grad_ND: captured hidden states, sampled tokens and hidden gradient. ``entropy``: also the
    direction of the entropy. ``kept``: (n, V) log-probs -> (n,) kept mass, applied to the first head on ``kept_rows``
    (bool, N). Nothing here draws random numbers or touches a parameter's ``.grad``.
    """
    names = list(heads)
    pieces: dict[str, list[Tensor]] = {}
    if kept is not None:
        pieces["kept"] = [_kept_mass(heads[names[0]].logits, kept, kept_rows, hidden_ND, temperature, rows)]
    if not any(head.holds_logits for head in heads.values()):
        rows = FUSED_ROWS

    def put(key: str, value: Tensor) -> None:
        pieces.setdefault(key, []).append(value)

    for start in range(0, hidden_ND.shape[0], rows):
        part = slice(start, start + rows)
        grad = grad_ND[part]
        u_of: dict[str, Tensor] = {}
        for name in names:
            found = _directions(heads[name], hidden_ND[part], targets_N[part], temperature, entropy)
            put(f"{name}.logps", found.logps_N)
            put(f"{name}.entropies", found.entropies_N)
            gg, gu, uu = row_products(grad, found.u_ND)
            if name == names[0]:
                put("gg", gg)
            put(f"{name}.gu", gu)
            put(f"{name}.uu", uu)
            if found.w_ND is not None:
                _, uw, ww = row_products(found.u_ND, found.w_ND)
                put(f"{name}.uw", uw)
                put(f"{name}.ww", ww)
                put(f"{name}.gw", row_products(grad, found.w_ND)[1])
            u_of[name] = found.u_ND
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                put(f"{a}|{b}", row_products(u_of[a], u_of[b])[1])
    return _assemble(names, pieces, hidden_ND)


def solve(spectrum: Spectrum, head: str) -> Measured:
    """Coefficients of the measured gradient in the directions of one head, by least squares per token."""
    return solve_heads(spectrum, (head,))[head]


def solve_heads(spectrum: Spectrum, heads: Iterable[str] | None = None) -> dict[str, Measured]:
    """The same for several heads, ``None`` for all, with one copy to the host."""
    names = list(spectrum.views if heads is None else heads)
    found = [_least_squares(spectrum, name) for name in names]
    sums = torch.stack([spectrum.gg_N.sum(), *(left_N.clamp(min=0).sum() for _, _, left_N in found)])
    total, *left = sums.tolist()
    return {
        name: Measured(c_N, e_N, math.sqrt(rest / total) if total > 0 else 0.0, math.sqrt(total))
        for name, rest, (c_N, e_N, _) in zip(names, left, found, strict=True)
    }


def _least_squares(spectrum: Spectrum, head: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """c, e and |g - c u - e w|^2 of every token."""
    v = spectrum.views[head]
    safe_uu = v.uu_N.clamp(min=torch.finfo(torch.float64).tiny)
    if v.ww_N is None or v.uw_N is None or v.gw_N is None:
        c = torch.where(v.uu_N > 0, v.gu_N / safe_uu, 0.0)
        return c, None, spectrum.gg_N - 2 * c * v.gu_N + c * c * v.uu_N
    det = v.uu_N * v.ww_N - v.uw_N**2
    independent = det > 1e-12 * v.uu_N * v.ww_N  # a one-hot distribution has no entropy direction
    safe_det = torch.where(independent, det, 1.0)
    c = torch.where(independent, (v.gu_N * v.ww_N - v.gw_N * v.uw_N) / safe_det, v.gu_N / safe_uu)
    e = torch.where(independent, (v.gw_N * v.uu_N - v.gu_N * v.uw_N) / safe_det, 0.0)
    left = spectrum.gg_N - 2 * c * v.gu_N - 2 * e * v.gw_N + spectrum.squared_N(head, c, e)
    return c, e, left


def _directions(head: Head, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Directions:
    """u, w, log-probs and entropies of one tile, without a gradient of the head's weight where the head has a way."""
    if head.directions is not None:
        return head.directions(hidden.detach(), targets, entropy)
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_(True)
        logps, entropies = score(head, leaf, targets, temperature)
        (u,) = torch.autograd.grad(logps.sum(), leaf, retain_graph=entropy)
        w = torch.autograd.grad(entropies.sum(), leaf)[0] if entropy else None
    return Directions(u, w, logps.detach(), entropies.detach())


def score(head: Head, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, (n,), differentiable by hidden and head."""
    if head.fused is not None:
        return head.fused(hidden, targets)
    log_p = _log_probs(head.logits, hidden, temperature)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _log_probs(logits: Logits, hidden: Tensor, temperature: float) -> Tensor:
    values = logits(hidden)
    return torch.log_softmax((values if values.dtype == torch.float64 else values.float()) / temperature, dim=-1)


@torch.no_grad()
def _kept_mass(
    logits: Logits,
    kept: Callable[[Tensor], Tensor],
    chosen_N: Tensor | None,
    hidden_ND: Tensor,
    temperature: float,
    rows: int,
) -> Tensor:
    """Kept mass on the chosen rows, NaN elsewhere."""
    mass = hidden_ND.new_full((hidden_ND.shape[0],), float("nan"), dtype=torch.float64)
    chosen = torch.ones_like(mass, dtype=torch.bool) if chosen_N is None else chosen_N
    parts = [kept(_log_probs(logits, part, temperature)).double() for part in hidden_ND[chosen].split(rows)]
    if parts:
        mass[chosen] = torch.cat(parts)
    return mass


def _assemble(names: list[str], pieces: dict[str, list[Tensor]], like: Tensor) -> Spectrum:
    def get(key: str) -> Tensor:
        parts = pieces.get(key)
        return torch.cat(parts) if parts else like.new_zeros((0,), dtype=torch.float64)

    def maybe(key: str) -> Tensor | None:
        return get(key) if key in pieces else None

    views = {
        n: HeadView(
            get(f"{n}.logps"),
            get(f"{n}.entropies"),
            get(f"{n}.uu"),
            get(f"{n}.gu"),
            maybe(f"{n}.uw"),
            maybe(f"{n}.ww"),
            maybe(f"{n}.gw"),
        )
        for n in names
    }
    cross = {(a, b): get(f"{a}|{b}") for i, a in enumerate(names) for b in names[i + 1 :]}
    return Spectrum(views, get("gg"), cross, maybe("kept"))
