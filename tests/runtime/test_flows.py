"""Units that were sharded one by one, with no root, have a flow each and one group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu.rows import fake_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.optimizer import _global_optimizer_pre_hooks

import shardwright as sw


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_group(2):
        yield init_device_mesh("cpu", (2,))


@pytest.mark.parametrize("root", [False, True])
def test_one_reduce_of_a_group_is_under_way_whichever_flow_began_it(
    mesh: DeviceMesh, root: bool
) -> None:
    """Else the buffers of all units would be there until the backward is over."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    storages = [sw.fully_shard_flat(layer, mesh, prefetch=1) for layer in model]
    if root:
        sw.fully_shard_flat(model, mesh, prefetch=1)
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(bool(each.unit.gradients.under_way) for each in storages))

    x = torch.ones(2, 8, requires_grad=True)
    for layer in model:
        x = layer(x)
        x.register_hook(look)
    x.sum().backward()
    assert most == 1
    assert not any(each.unit.gradients.under_way for each in storages)
    assert all(p.grad is not None for p in model.parameters())


class _Spared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return self.spared(found) if whole else found


@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Replicate()])
def test_a_part_without_a_gradient_is_named_in_every_step(
    mesh: DeviceMesh, placement: sw.Placement
) -> None:
    """After a step in which all had one, too; what clears gradients is free to."""
    model = _Spared()
    sw.fully_shard_flat(model, mesh, placements=(placement,))
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model))
    for whole in (False, True, False):
        model(torch.ones(2, 4), whole).sum().backward()
        if whole:
            optimizer.step()
        else:
            with pytest.raises(
                sw.InputError, match=r"^spared\.\w+ of unit '_Spared': expected a g"
            ):
                optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2, 4), False).sum().backward()
    model(torch.ones(2, 4), True).sum().backward()
    optimizer.step()


def test_no_hook_is_on_optimizers_and_one_from_before_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(_global_optimizer_pre_hooks)
    sw.fully_shard_flat(model, mesh)
    sw.optimizer_parameters(model)
    assert len(_global_optimizer_pre_hooks) == before
    for step in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(sw.InputError, match="Make the optimizer after sharding"):
            step()
