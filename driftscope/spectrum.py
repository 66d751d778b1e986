"""The spectrometer: token coefficients of a loss path, measured from the hidden gradient it sent into the trunk.

Shapes: N tokens, D hidden size, V vocabulary. For a head with logits z(h) and ``logp = log_softmax(z/tau)[y]`` every
loss of the family gives ``dL/dh = c * u + e * w`` with ``u = dlogp/dh``, ``c = dL/dlogp`` and, where the loss has an
entropy term, ``w = dH/dh``, ``e = dL/dH``. Given the hidden gradient g, least squares per token returns c (and e),
and the residual says how much of g no coefficient explains. Products are accumulated in float64: the residual is a
small difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]  # (n, D) hidden states -> (n, V) logits, before the temperature
FUSED_ROWS = 4096  # tokens at a time where no logits are held


@dataclass(frozen=True)
class Head:
    """A head: its logits and, where there is one, a fused way to log-probs and entropies.

    fused: (n, D) hidden states, (n,) targets -> (n,) log-probs and entropies, temperature applied, differentiable.
    """

    logits: Logits
    fused: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


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
    """One pass over the heads, in tiles of ``rows`` tokens (of ``FUSED_ROWS`` where every head has a fused way).

    hidden_ND, targets_N, grad_ND: captured hidden states, sampled tokens and hidden gradient. ``entropy``: also the
    direction of the entropy. ``kept``: (n, V) log-probs -> (n,) kept mass, applied to the first head on ``kept_rows``
    (bool, N). Nothing here draws random numbers or touches a parameter's ``.grad``.
    """
    names = list(heads)
    pieces: dict[str, list[Tensor]] = {}
    if kept is not None:
        pieces["kept"] = [_kept_mass(heads[names[0]].logits, kept, kept_rows, hidden_ND, temperature, rows)]
    if all(head.fused is not None for head in heads.values()):
        rows = FUSED_ROWS

    def put(key: str, value: Tensor) -> None:
        pieces.setdefault(key, []).append(value)

    for start in range(0, hidden_ND.shape[0], rows):
        part = slice(start, start + rows)
        grad = grad_ND[part].double()
        put("gg", (grad * grad).sum(-1))
        directions: dict[str, Tensor] = {}
        for name in names:
            u, w, logps, entropies = _directions(heads[name], hidden_ND[part], targets_N[part], temperature, entropy)
            put(f"{name}.logps", logps)
            put(f"{name}.entropies", entropies)
            put(f"{name}.uu", (u * u).sum(-1))
            put(f"{name}.gu", (grad * u).sum(-1))
            if w is not None:
                put(f"{name}.uw", (u * w).sum(-1))
                put(f"{name}.ww", (w * w).sum(-1))
                put(f"{name}.gw", (grad * w).sum(-1))
            directions[name] = u
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                put(f"{a}|{b}", (directions[a] * directions[b]).sum(-1))
    return _assemble(names, pieces, hidden_ND)


def solve(spectrum: Spectrum, head: str) -> Measured:
    """Coefficients of the measured gradient in the directions of one head, by least squares per token."""
    v = spectrum.views[head]
    safe_uu = v.uu_N.clamp(min=torch.finfo(torch.float64).tiny)
    if v.ww_N is None or v.uw_N is None or v.gw_N is None:
        c = torch.where(v.uu_N > 0, v.gu_N / safe_uu, 0.0)
        left = spectrum.gg_N - 2 * c * v.gu_N + c * c * v.uu_N
        return Measured(c, None, _residual(left, spectrum.gg_N))
    det = v.uu_N * v.ww_N - v.uw_N**2
    independent = det > 1e-12 * v.uu_N * v.ww_N  # a one-hot distribution has no entropy direction
    safe_det = torch.where(independent, det, 1.0)
    c = torch.where(independent, (v.gu_N * v.ww_N - v.gw_N * v.uw_N) / safe_det, v.gu_N / safe_uu)
    e = torch.where(independent, (v.gw_N * v.uu_N - v.gu_N * v.uw_N) / safe_det, 0.0)
    left = spectrum.gg_N - 2 * c * v.gu_N - 2 * e * v.gw_N + spectrum.squared_N(head, c, e)
    return Measured(c, e, _residual(left, spectrum.gg_N))


def _residual(left_N: Tensor, gg_N: Tensor) -> float:
    total = float(gg_N.sum())
    return float((left_N.clamp(min=0).sum() / total).sqrt()) if total > 0 else 0.0


def _directions(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_(True)
        logps, entropies = score(head, leaf, targets, temperature)
        (u,) = torch.autograd.grad(logps.sum(), leaf, retain_graph=entropy)
        w = torch.autograd.grad(entropies.sum(), leaf)[0].double() if entropy else None
    return u.double(), w, logps.detach(), entropies.detach()


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
