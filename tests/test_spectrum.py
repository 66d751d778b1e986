"""The spectrometer against gradients whose coefficients are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from driftscope.kernels import Directions, fused_linear_logprobs, linear_directions
from driftscope.spectrum import Head, measure, score, solve, solve_heads, tile_rows

N, D, V = 23, 16, 57


def scene(dtype: torch.dtype = torch.float64, softcap: float | None = None):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, (N,), generator=g)
    coefs = torch.randn(N, generator=g, dtype=torch.float64)
    coefs[::5] = 0

    def head(h: torch.Tensor) -> torch.Tensor:
        logits = h @ weight.T
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    return hidden, weight, targets, coefs, head


def gradient(hidden, targets, head, temperature, coefs, bonus=None):
    leaf = hidden.clone().requires_grad_(True)
    log_p = torch.log_softmax(head(leaf) / temperature, -1)
    loss = (coefs * log_p.gather(-1, targets[:, None])[:, 0]).sum()
    if bonus is not None:
        loss = loss - (bonus * (log_p.exp() * log_p).sum(-1)).sum()
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_coefficients_come_back(softcap, rows):
    hidden, _, targets, coefs, head = scene(softcap=softcap)
    grad = gradient(hidden, targets, head, 0.7, coefs)
    spectrum = measure({"h": Head(head)}, hidden, targets, grad, temperature=0.7, rows=rows)
    found = solve(spectrum, "h")
    torch.testing.assert_close(found.c_N, coefs, rtol=1e-10, atol=1e-12)
    assert found.residual < 1e-7  # |g|^2 is rounded to float64 before the difference
    assert found.e_N is None
    assert spectrum.norm("h", coefs) == pytest.approx(float(grad.norm()), rel=1e-12)
    assert spectrum.measured_norm() == pytest.approx(float(grad.norm()), rel=1e-12)


def test_closed_form_of_the_direction():
    hidden, weight, targets, coefs, head = scene()
    p = torch.softmax(hidden @ weight.T / 0.7, -1)
    u = (weight[targets] - p @ weight) / 0.7
    spectrum = measure(
        {"h": Head(head)}, hidden, targets, gradient(hidden, targets, head, 0.7, coefs), temperature=0.7, rows=5
    )
    torch.testing.assert_close(spectrum.views["h"].uu_N, u.square().sum(-1))


def test_entropy_term_is_told_from_the_policy_term():
    hidden, _, targets, coefs, head = scene()
    bonus = torch.linspace(-0.3, 0.4, N, dtype=torch.float64)
    grad = gradient(hidden, targets, head, 1.0, coefs, bonus)
    both = solve(measure({"h": Head(head)}, hidden, targets, grad, temperature=1.0, rows=6, entropy=True), "h")
    torch.testing.assert_close(both.c_N, coefs, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(both.e_N, bonus, rtol=1e-8, atol=1e-10)
    assert both.residual < 1e-6
    alone = solve(measure({"h": Head(head)}, hidden, targets, grad, temperature=1.0, rows=6), "h")
    assert alone.residual > 0.01


def test_an_extra_term_is_residual():
    hidden, _, targets, coefs, head = scene()
    grad = gradient(hidden, targets, head, 1.0, coefs)
    noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = solve(measure({"h": Head(head)}, hidden, targets, grad + 0.1 * noise, temperature=1.0, rows=6), "h")
    assert found.residual > 0.01


def test_the_right_head_has_the_smaller_residual():
    hidden, _, targets, coefs, capped = scene(softcap=2.0)
    *_, plain = scene()
    grad = gradient(hidden, targets, plain, 1.0, coefs)
    spectrum = measure({"capped": Head(capped), "plain": Head(plain)}, hidden, targets, grad, temperature=1.0, rows=4)
    assert solve(spectrum, "plain").residual < 1e-7
    assert solve(spectrum, "capped").residual > 0.05
    assert set(spectrum.cross_N) == {("capped", "plain")}


def test_float32_residual_is_rounding():
    hidden, _, targets, coefs, head = scene(torch.float32)
    grad = gradient(hidden, targets, head, 0.9, coefs.float())
    assert solve(measure({"h": Head(head)}, hidden, targets, grad, temperature=0.9, rows=8), "h").residual < 1e-6


def test_no_token_and_a_zero_gradient():
    hidden, _, targets, _, head = scene()
    none = measure({"h": Head(head)}, hidden[:0], targets[:0], hidden[:0], temperature=1.0, rows=4)
    assert solve(none, "h").residual == 0.0
    zero = measure({"h": Head(head)}, hidden, targets, torch.zeros_like(hidden), temperature=1.0, rows=4)
    assert solve(zero, "h").residual == 0.0
    assert float(solve(zero, "h").c_N.abs().max()) == 0.0


def test_extreme_logits_stay_finite():
    hidden, weight, targets, coefs, _ = scene()

    def sharp(h: torch.Tensor) -> torch.Tensor:
        return 1e3 * (h @ weight.T)

    grad = gradient(hidden, targets, sharp, 1.0, coefs)
    found = solve(measure({"h": Head(sharp)}, hidden, targets, grad, temperature=1.0, rows=4, entropy=True), "h")
    assert torch.isfinite(found.c_N).all()
    assert torch.isfinite(found.e_N).all()


def test_parameters_and_random_state_are_untouched():
    hidden, weight, targets, coefs, _ = scene()
    weight.requires_grad_(True)
    grad = gradient(hidden, targets, lambda h: h @ weight.T, 1.0, coefs)
    before = torch.get_rng_state()
    measure({"h": Head(lambda h: h @ weight.T)}, hidden, targets, grad, temperature=1.0, rows=4)
    assert weight.grad is None
    assert torch.equal(before, torch.get_rng_state())


def test_kept_mass_on_chosen_rows():
    hidden, _, targets, coefs, head = scene()
    grad = gradient(hidden, targets, head, 1.0, coefs)
    rows = torch.arange(N) % 3 == 0
    spectrum = measure(
        {"h": Head(head)},
        hidden,
        targets,
        grad,
        temperature=1.0,
        rows=4,
        kept=lambda log_p: log_p.exp().amax(-1),
        kept_rows=rows,
    )
    assert torch.equal(torch.isfinite(spectrum.kept_mass_N), rows)


def test_tile_rows():
    assert tile_rows(1000, 16_000_000) == 1000
    assert tile_rows(10**9, 1) == 1


@pytest.mark.parametrize("entropy", [False, True])
def test_a_fused_head_gives_the_same(entropy):
    hidden, _, targets, coefs, head = scene()

    def fused(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(head(h) / 0.7, -1)
        return log_p.gather(-1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    grad = gradient(hidden, targets, head, 0.7, coefs)
    plain = measure({"h": Head(head)}, hidden, targets, grad, temperature=0.7, rows=5, entropy=entropy)
    quick = measure({"h": Head(head, fused)}, hidden, targets, grad, temperature=0.7, rows=5, entropy=entropy)
    torch.testing.assert_close(quick.views["h"].logps_N, plain.views["h"].logps_N)
    torch.testing.assert_close(solve(quick, "h").c_N, solve(plain, "h").c_N)
    assert solve(quick, "h").residual < 1e-6


def narrow(dtype: torch.dtype):
    """A head in a narrow dtype: hidden states, weight, targets drawn from it, coefficients and the live gradient."""
    g = torch.Generator().manual_seed(4)
    hidden = torch.randn(96, 64, generator=g).to(dtype)
    weight = (torch.randn(503, 64, generator=g) * 0.3).to(dtype).requires_grad_(True)
    p = torch.softmax((hidden.float() @ weight.detach().float().T), -1)
    targets = torch.multinomial(p, 1, generator=g)[:, 0]
    coefs = torch.randn(96, generator=g) * 1e-2
    leaf = hidden.clone().requires_grad_(True)
    log_p = (leaf @ weight.T).float().log_softmax(-1)
    (live,) = torch.autograd.grad((log_p.gather(-1, targets[:, None])[:, 0] * coefs).sum(), leaf)
    return hidden, weight, targets, coefs.double(), live.float()


def three_ways(weight: torch.Tensor, temperature: float = 1.0) -> dict[str, Head]:
    """The same head through its logits, through differentiable fused log-probs, and through its directions."""

    def logits(h: torch.Tensor) -> torch.Tensor:
        return h @ weight.T

    def fused(h: torch.Tensor, y: torch.Tensor):
        return fused_linear_logprobs(h, weight, y, temperature=temperature, with_entropy=True)

    def directions(h: torch.Tensor, y: torch.Tensor, entropy: bool) -> Directions:
        return linear_directions(h, weight, y, temperature=temperature, with_entropy=entropy)

    return {"logits": Head(logits), "fused": Head(logits, fused), "directions": Head(logits, fused, directions)}


@pytest.mark.parametrize("entropy", [False, True])
def test_three_ways_give_the_same(entropy):
    hidden, weight, targets, coefs, head = scene()
    bonus = torch.linspace(-0.3, 0.4, N, dtype=torch.float64) if entropy else None
    grad = gradient(hidden, targets, head, 0.7, coefs, bonus)
    heads = three_ways(weight, 0.7)
    found = {
        name: measure({"h": way}, hidden, targets, grad, temperature=0.7, rows=5, entropy=entropy)
        for name, way in heads.items()
    }
    wanted = found["logits"].views["h"]
    for name in ("fused", "directions"):
        for field, value in vars(wanted).items():
            other = getattr(found[name].views["h"], field)
            if value is None:
                assert other is None
            else:
                torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-12)
        solved = solve(found[name], "h")
        torch.testing.assert_close(solved.c_N, coefs, rtol=1e-8, atol=1e-10)
        assert solved.residual < 1e-6
        assert solved.norm == pytest.approx(float(grad.norm()), rel=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
def test_residuals_of_the_three_ways(dtype, bound):
    """Directions that are not rounded leave only the live gradient's own rounding: sqrt(2) less in a narrow dtype."""
    hidden, weight, targets, coefs, live = narrow(dtype)
    solved = {
        name: solve(measure({"h": head}, hidden, targets, live, temperature=1.0, rows=32), "h")
        for name, head in three_ways(weight).items()
    }
    fused, quick = solved["fused"], solved["directions"]
    assert fused.residual < bound
    if dtype == torch.float32:
        assert quick.residual < 1.1 * fused.residual
    else:
        assert 0.6 < quick.residual / fused.residual < 0.85
        assert quick.residual > torch.finfo(dtype).eps / 16  # the live gradient's rounding is still seen
    for name in solved:
        assert float((solved[name].c_N - coefs).norm() / coefs.norm()) < bound


class _Products(TorchDispatchMode):
    """Matrix products inside of it: the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_the_head_pass_asks_for_no_gradient_of_the_weight(entropy):
    hidden, weight, targets, _, live = narrow(torch.float32)
    (rows, size), vocabulary = hidden.shape, weight.shape[0]

    def products(head: Head) -> list[tuple[int, ...]]:
        with _Products() as seen:
            measure({"h": head}, hidden, targets, live, temperature=1.0, rows=rows, entropy=entropy)
        return seen.shapes

    ways = three_ways(weight)
    backward = [(rows, size)] * (2 if entropy else 1)
    assert products(ways["directions"]) == [(rows, vocabulary), *backward]
    assert (vocabulary, size) not in products(ways["logits"])
    assert (vocabulary, size) in products(ways["fused"])  # what the third way is there to avoid
    assert weight.grad is None


def test_a_loss_still_reaches_the_weight_through_the_fused_way():
    hidden, weight, targets, coefs, _ = narrow(torch.float32)
    logps, _ = score(three_ways(weight)["directions"], hidden, targets, 1.0)
    (logps * coefs).sum().backward()
    plain = weight.detach().double().requires_grad_(True)
    log_p = (hidden.double() @ plain.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    (wanted,) = torch.autograd.grad((log_p * coefs).sum(), plain)
    torch.testing.assert_close(weight.grad.double(), wanted, rtol=1e-4, atol=1e-7)


def test_several_heads_are_solved_with_one_read(monkeypatch):
    hidden, _, targets, coefs, capped = scene(softcap=2.0)
    *_, plain = scene()
    grad = gradient(hidden, targets, plain, 1.0, coefs)
    spectrum = measure({"capped": Head(capped), "plain": Head(plain)}, hidden, targets, grad, temperature=1.0, rows=4)
    alone = {name: solve(spectrum, name) for name in ("capped", "plain")}
    reads = []
    for name in ("tolist", "item", "__float__", "__bool__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, _real=real: reads.append(1) or _real(t, *a))
    both = solve_heads(spectrum)
    assert len(reads) == 1
    for name, found in both.items():
        assert (found.residual, found.norm) == (alone[name].residual, alone[name].norm)
        assert torch.equal(found.c_N, alone[name].c_N)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(bad):
    hidden, _, targets, coefs, head = scene()
    grad = gradient(hidden, targets, head, 1.0, coefs)
    grad[3, 2] = bad
    found = solve(measure({"h": Head(head)}, hidden, targets, grad, temperature=1.0, rows=4), "h")
    assert not math.isfinite(found.norm)
