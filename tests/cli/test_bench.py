"""``driftscope bench`` where there is no GPU, and its wrong uses."""

from __future__ import annotations

import pytest
import torch

from driftscope.cli import main


@pytest.fixture
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu_it_checks_and_says_that_timings_need_one(capsys):
    assert main(["bench"]) == 0
    told = capsys.readouterr().out
    assert "96-48-1003-trainable-dense: driftscope" in told
    assert "timings need a GPU" in told


@pytest.mark.usefixtures("_no_gpu")
def test_a_wrong_gradient_ends_it_with_one_and_no_time(capsys, monkeypatch):
    from driftscope.kernels import passes

    real = passes.GradientSums.add
    monkeypatch.setattr(passes.GradientSums, "add", lambda s, t, h, r: real(s, t.mul_(1.01), h, r))
    assert main(["bench"]) == 1
    said = capsys.readouterr()
    assert "no time is reported for a wrong result" in said.err
    assert "right here" not in said.out


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["1,2", "a,b,c"])
def test_a_shape_that_is_none_is_named(shape, capsys):
    assert main(["bench", "--shape", shape]) == 2
    assert "N,D,V" in capsys.readouterr().err
