"""Units that were sharded one by one, with no root, have a flow each and one group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu.rows import fake_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
