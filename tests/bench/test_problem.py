"""The benchmark's problem is what it says, and its gate can be red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from driftscope.bench.measure import Measurement, measure_path, relative_error
from driftscope.bench.paths import own_paths
from driftscope.bench.plot import scaling_plot
from driftscope.bench.problem import Case, coefficients_N, make_problem, policy_loss, truth
from driftscope.bench.run import RedGateError, cases, check

CPU = torch.device("cpu")
SMALL = Case(rows=96, hidden_size=16, vocabulary=203, trainable=True)


def ragged_rows() -> Case:
    return Case(rows=16384, hidden_size=2, vocabulary=3, trainable=False, ragged=True)


def test_a_ragged_batch_is_half_padding_and_two_fifths_of_the_rest_are_silent():
    problem = make_problem(ragged_rows(), CPU, torch.float32)
    assert problem.scored_rows / 16384 == pytest.approx(0.5, abs=0.01)
    assert problem.active_rows / problem.scored_rows == pytest.approx(0.6, abs=0.02)
    assert problem.active_rows == int((coefficients_N(problem) != 0).sum())


def test_the_unavoidable_products_count_forward_and_backward_rows_apart():
    problem = make_problem(ragged_rows(), CPU, torch.float32)
    assert problem.gemm_operations == 12.0 * (problem.scored_rows + problem.active_rows)
    dense = make_problem(replace(ragged_rows(), ragged=False, trainable=True), CPU, torch.float32)
    assert dense.gemm_operations == 3 * 12.0 * 16384


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_the_truth_is_the_derivative_of_the_plain_loss(trainable, ragged):
    problem = make_problem(replace(SMALL, trainable=trainable, ragged=ragged), CPU, torch.float32)
    leaves = [problem.hidden_ND.double().requires_grad_(True), problem.weight_VD.double().requires_grad_(True)]
    logps = (leaves[0] @ leaves[1].t()).log_softmax(-1).gather(-1, problem.targets_BT.reshape(-1, 1)).squeeze(-1)
    loss = policy_loss(problem, logps)
    hidden, weight = torch.autograd.grad(loss, leaves)
    found = truth(problem)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert relative_error(found.hidden_ND, hidden.float()) < 1e-6
    assert (found.weight_VD is None) is not trainable
    if trainable:
        assert relative_error(found.weight_VD, weight.float()) < 1e-6


@pytest.mark.parametrize("ragged", [False, True])
def test_every_own_path_passes_the_gate(ragged):
    case = replace(SMALL, ragged=ragged)
    problem = make_problem(case, CPU, torch.bfloat16)
    true = truth(problem)
    found = {
        e.name: measure_path(problem, true, e.name, e.path, e.note, timed=False)
        for e in own_paths(problem, workspace_bytes=32 << 10)
    }
    assert len(found) == (4 if ragged else 3)
    check(found, torch.bfloat16, case)
    assert 1e-4 < found["plain PyTorch"].hidden_error < 1e-2


def measurement(name: str, **errors) -> Measurement:
    return Measurement(name=name, note="", **{"hidden_error": 1e-3, "weight_error": 1e-3, **errors})


@pytest.mark.parametrize(
    "mine",
    [{"hidden_error": 3e-3}, {"weight_error": 3e-3}, {"hidden_error": float("nan")}, {"failed": "out of memory"}],
)
def test_no_time_is_taken_on_a_red_gate(mine):
    plain = measurement("plain PyTorch")
    check({"plain PyTorch": plain, "driftscope": measurement("driftscope")}, torch.bfloat16, SMALL)
    with pytest.raises(RedGateError, match="96-16-203-trainable-dense") as raised:
        check({"plain PyTorch": plain, "driftscope": measurement("driftscope", **mine)}, torch.bfloat16, SMALL)
    assert raised.value.exit_code == 1


def test_a_path_that_raises_is_a_failed_measurement():
    problem = make_problem(SMALL, CPU, torch.float32)

    def broken(hidden, weight):
        raise RuntimeError("no such kernel")

    found = measure_path(problem, truth(problem), "broken", broken, "", timed=False)
    assert found.failed == "RuntimeError: no such kernel"
    assert found.hidden_error is None


def test_the_usual_cases_are_four_shapes_two_heads_two_batches():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 16


def test_an_error_of_nan_is_no_small_error():
    assert not relative_error(torch.tensor([float("nan")]), torch.ones(1)) <= 1e9


def test_the_plot_draws_every_measured_point():
    def result(n, v, trainable):
        path = {"name": "driftscope", "failed": None, "sustained_ms": n * v / 1e9, "peak_bytes": 1 << 30}
        failed = {"name": "a <peer>", "failed": "oom", "sustained_ms": None, "peak_bytes": None}
        sizes = {"rows": n, "vocabulary": v, "hidden_size": 8}
        return {**sizes, "trainable": trainable, "paths": [path, failed]}

    sizes = [(1024, 4096), (2048, 4096), (4096, 4096), (2048, 8192)]
    drawn = scaling_plot([result(n, v, t) for t in (True, False) for n, v in sizes])
    assert drawn.startswith("<svg") and drawn.rstrip().endswith("</svg>")
    assert drawn.count("<circle") == 2 * (2 * 3 + 2 * 2)
    assert "a &lt;peer&gt;" in drawn
