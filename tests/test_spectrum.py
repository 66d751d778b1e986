"""The spectrometer against gradients whose coefficients are known."""

from __future__ import annotations

import pytest
import torch

from driftscope.spectrum import Head, measure, solve, tile_rows

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
