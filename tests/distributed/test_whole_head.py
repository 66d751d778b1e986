"""The head made whole, in one process: a real trainer whose head FSDP2 holds in one shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from driftscope.hooks.scope import attach
from driftscope.hooks.sharding import ShardedHead, plain_copy, sharding, split_gradients, split_weights, trained_whole
from tests.hooks.runs import steps_of, trainer


@pytest.fixture
def one_process() -> Iterator[Any]:
    """A device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_plain_trainer_needs_nothing(tmp_path: Path) -> None:
    with trainer(tmp_path) as made:
        head = ShardedHead(made, made.model)
        assert sharding(made) == "none"
        assert head.missing() is split_weights(made) is split_gradients(made) is None
        head.reserve()
        head.gather()
        with head.in_place():
            assert made.model.get_output_embeddings() is made.model.lm_head
        assert head._whole is None


def test_the_head_of_fsdp2(tmp_path: Path, one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(tmp_path) as made:
        from torch.distributed.fsdp import fully_shard

        own, values = made.model.lm_head, made.model.lm_head.weight.detach().clone()
        seen: list[Any] = []
        own.register_forward_pre_hook(lambda *_: seen.append(1))
        fully_shard(own, mesh=one_process)
        head = ShardedHead(made, made.model)
        assert sharding(made) == "fsdp2"
        assert "FSDP shards" in str(split_weights(made))
        assert "FSDP shards" in str(split_gradients(made))
        assert "not gathered" in str(head.missing())
        with head.in_place():
            assert made.model.lm_head is own

        head.reserve()
        head.gather()
        assert head.missing() is None
        weight = own.weight
        assert isinstance(weight, DTensor)
        with head.in_place(), head.in_place():
            plain = made.model.get_output_embeddings()
            assert plain is made.model.lm_head
            assert plain is not own
            assert type(plain.weight) is torch.nn.Parameter
            assert torch.equal(plain.weight, values)
            hidden = torch.randn(3, 64)
            assert torch.equal(plain(hidden), hidden @ values.T)
            assert seen == [1], "hooks that others have put on the head still run"
            assert len(plain._forward_pre_hooks) == 1 < len(own._forward_pre_hooks)
        with pytest.raises(KeyError), head.in_place():
            {}[made.model.lm_head]
        assert made.model.lm_head is own
        assert own.weight is weight

        whole = head._whole
        with monkeypatch.context() as patched:
            patched.setattr(DTensor, "full_tensor", None)  # a second gather in one step runs no collective
            head.reserve()
            head.gather()
        assert head._whole is whole

        with torch.no_grad():
            own.weight.to_local().mul_(2.0)
        made.state.global_step += 1
        assert "not gathered" in str(head.missing()), "a gathered head is stale after an optimizer step"
        head.gather()
        with head.in_place():
            assert torch.equal(made.model.lm_head.weight, 2 * values)
        head.release()
        assert head.missing() is not None


def test_a_failed_gather_leaves_nothing(tmp_path: Path, one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(tmp_path) as made:
        from torch.distributed.fsdp import fully_shard

        fully_shard(made.model.lm_head, mesh=one_process)
        head = ShardedHead(made, made.model)
        head.gather()
        made.state.global_step += 1
        with monkeypatch.context() as patched:
            patched.setattr(DTensor, "full_tensor", None)
            with pytest.raises(TypeError):
                head.gather()
        assert head._whole is None
        assert head.missing() is not None


def test_the_gradient_through_a_whole_parameter(one_process: Any) -> None:
    value = torch.randn(4, 3)
    parameter = torch.nn.Parameter(dist.tensor.distribute_tensor(value, one_process, [dist.tensor.Shard(0)]))
    (trained_whole(parameter) * value).sum().backward()
    assert isinstance(parameter.grad, DTensor)
    assert torch.equal(parameter.grad.full_tensor(), value)
    plain = torch.nn.Parameter(value)
    assert trained_whole(plain) is plain


def test_a_copy_shares_what_it_does_not_replace() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    module[2].weight = module[0].weight  # tied
    values = {id(p): torch.nn.Parameter(p.detach() + 1) for p in module.parameters()}
    module[2].bias = None
    twin = plain_copy(module, values)
    assert twin[0].weight is twin[2].weight is values[id(module[0].weight)]
    assert twin[2].bias is None
    assert twin[1].running_mean is module[1].running_mean
    twin[0].training = False
    assert module[0].training


def test_an_optimizer_that_steps_inside_the_backward(tmp_path: Path) -> None:
    """A head that is no longer the one that made the gradient is not measured, and the record says why."""
    with trainer(tmp_path) as made:
        scope = attach(made, tmp_path / "run", spectrum_every=1, deep_every=0, console=False, report=False)

        def step(parameter: torch.nn.Parameter) -> None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-10.0)

        made.model.lm_head.weight.register_post_accumulate_grad_hook(step)
        assert "inside the backward" in str(split_weights(made))
        made.train()
        assert scope.guard.off == {}
        scope.detach()
    records = steps_of(tmp_path / "run")
    assert len(records) == 4
    assert all("steps inside the backward" in record.unavailable["head"] for record in records)


def test_the_dtype_and_the_state_of_the_live_forward(tmp_path: Path, one_process: Any) -> None:
    """Gathered in the dtype that FSDP computes in, from its shards as from what it has gathered itself."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with trainer(tmp_path) as made:
        own = made.model.lm_head
        fully_shard(own, mesh=one_process, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        made.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, mixed_precision_policy="bf16"
        )
        head = ShardedHead(made, made.model)
        head.gather()
        assert head._whole is not None
        from_shards = head._whole.weight
        own.unshard()
        assert not isinstance(own.weight, DTensor)
        assert from_shards.dtype == own.weight.dtype == torch.bfloat16
        assert torch.equal(from_shards, own.weight)
        head.release()
        head.gather()
        own.reshard()  # frees what FSDP had gathered
        assert head._whole is not None
        assert torch.equal(head._whole.weight, from_shards)
