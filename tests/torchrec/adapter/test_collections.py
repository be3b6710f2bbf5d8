"""TorchRec's collections, sharded by ours: what they give and how their tables start."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own modules
    torchrec = pytest.importorskip("torchrec", reason="TorchRec is not installed")

DIMS = {"t0": 8, "t1": 32}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _collection(device: str) -> nn.Module:
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=10, embedding_dim=dim, feature_names=[f"of_{name}"]
        )
        for name, dim in DIMS.items()
    ]
    return torchrec.EmbeddingBagCollection(tables=configs, device=torch.device(device))


def _sharded(collection: nn.Module, mesh: DeviceMesh) -> nn.Module:
    tables = [{"name": name, "rows": 10, "dim": dim} for name, dim in DIMS.items()]
    cluster = {"preset": "local", "world_size": 1}
    plan = sw.plan(sw.parse_job({"tables": tables, "cluster": cluster, "batch": {"size": 2}}))
    return sw.shard_embeddings(collection, plan, mesh, optimizer="sgd", learning_rate=0.1)


def test_bags_that_come_once_for_several_samples_are_given_as_by_torchrec(
    mesh: DeviceMesh,
) -> None:
    collection = _collection("cpu")
    bags = torchrec.KeyedJaggedTensor(
        keys=["of_t0", "of_t1"],
        values=torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([2, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["of_t0", "of_t1"], torch.tensor([[0, 1, 1, 0], [1, 2, 0, 0]])),
    )
    expected = collection(bags)
    found = _sharded(copy.deepcopy(collection), mesh)(bags)
    assert found.keys() == expected.keys()
    assert found.values().shape == (4, 40)
    assert torch.equal(found.values(), expected.values())


def test_tables_on_the_meta_device_start_as_torchrec_starts_them(mesh: DeviceMesh) -> None:
    state = sw.full_state_dict(_sharded(_collection("meta"), mesh))
    assert len(state) == len(DIMS)
    for weight in state.values():
        assert 0.2 < weight.abs().max() <= 10**-0.5  # uniform within one over the root of rows
